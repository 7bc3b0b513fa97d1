import math
import sys

import pytest
import torch
from torch import nn

import relprop
from relprop.compat import import_torchvision
from relprop.errors import RelpropError
from relprop.metrics import (
    class_sensitivity,
    conservation_error,
    max_sensitivity,
    parameter_randomisation,
    road,
    similarity,
    sparseness,
)

X = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def net(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(600, 4)
        ).eval()


def gradient(model, x, target):
    x = x.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(model(x).gather(1, target[:, None]).sum(), x)
    return result


def the_input(_model, x, _target):
    """Explains nothing: the same for all classes and models."""
    return x.clone()


class TestSparseness:
    @pytest.mark.parametrize(
        ("values", "gini"),
        [([1, 1, 1, 1], 0.0), ([0, 0, 0, 5], 0.75), ([1, 2, 3, 4], 0.25), ([-4, 3, -2, 1], 0.25), ([0, 0, 0, 0], 0.0)],
    )
    def test_by_hand(self, values, gini):
        assert sparseness(torch.tensor([values]).reshape(1, 2, 2)).tolist() == [pytest.approx(gini)]

    def test_is_the_mean_difference(self):
        values = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).double()
        size = values.abs()[0]
        expected = (size[:, None] - size).abs().mean() / (2 * size.mean())
        assert float(sparseness(values)) == pytest.approx(float(expected))


class TestConservation:
    def test_by_hand(self):
        maps = torch.tensor([[1.0, 2.0], [1.0, 1.0], [0.5, -0.25]])
        assert conservation_error(maps, torch.tensor([4.0, -2.0, 0.0])).tolist() == [0.25, 2.0, 0.25]

    def test_of_an_explanation(self):
        e = relprop.explain(net(), X)
        assert conservation_error(e.relevance, e.start).max() < 1e-5
        assert conservation_error(relprop.explain(net(), X, preset="epsilon").relevance, e.start).max() > 1e-3

    def test_refuses(self):
        with pytest.raises(RelpropError, match="one finite number for each of 2"):
            conservation_error(torch.zeros(2, 4), torch.tensor(1.0))


class TestSimilarity:
    def test_by_hand(self):
        a, b = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 3.0, 2.0, 40.0]])
        assert similarity(a, b).tolist() == [pytest.approx(0.8)]  # 1 - 6 * 2 / (4 * 15)
        assert similarity(a, -a).tolist() == [pytest.approx(-1)]
        assert similarity(a, 2 * a, "cosine").tolist() == [pytest.approx(1)]
        assert similarity(a, 2 * a + 5, "pearson").tolist() == [pytest.approx(1)]

    def test_tied_values_share_their_rank(self):
        from scipy.stats import spearmanr

        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randint(4, (1, 50), generator=generator).double() for _ in range(2))
        assert float(similarity(a, b)) == pytest.approx(spearmanr(a[0], b[0]).statistic)

    def test_constant_maps_are_like_nothing(self):
        assert similarity(torch.ones(1, 8, 8), torch.rand(1, 8, 8)).tolist() == [0]

    def test_structural_similarity(self):
        from skimage import metrics

        generator = torch.Generator().manual_seed(0)
        a, b = (torch.rand(1, 20, 24, generator=generator).double() for _ in range(2))
        b = 0.5 * a + b
        scaled = [((m - m.min()) / (m.max() - m.min()))[0].numpy() for m in (a, b)]
        expected = metrics.structural_similarity(*scaled, data_range=1.0)
        assert float(similarity(a, b, "ssim")) == pytest.approx(expected)
        assert similarity(a, a, "ssim").tolist() == [pytest.approx(1)]

    def test_refuses(self):
        with pytest.raises(RelpropError, match="'looks' is unknown"):
            similarity(X[:, 0], X[:, 1], "looks")
        with pytest.raises(RelpropError, match="cannot be compared"):
            similarity(X[:, 0], X)
        with pytest.raises(RelpropError, match="at least 7x7"):
            similarity(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), "ssim")
        with pytest.raises(RelpropError, match="finite"):
            sparseness(torch.full((1, 4), math.inf))


class TestClassSensitivity:
    def test_a_map_of_the_image_is_the_same_for_every_class(self):
        assert class_sensitivity(the_input, net(), X).tolist() == pytest.approx([1, 1, 1])

    def test_two_classes_of_opposite_weights(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(432, 2)).eval()
        with torch.no_grad():
            model[1].weight[1] = -model[1].weight[0]
        assert class_sensitivity(gradient, model, X).tolist() == pytest.approx([-1, -1, -1])

    def test_maps_at_hand_are_not_asked_for_again(self):
        model, asked = net(), []

        def method(module, x, target):
            asked.append(target.tolist())
            return gradient(module, x, target)

        whole = class_sensitivity(method, model, X)
        output = model(X)
        assert asked == [output.argmax(1).tolist(), output.argmin(1).tolist()]
        predicted = gradient(model, X, output.argmax(1))
        assert torch.equal(class_sensitivity(method, model, X, predicted=predicted), whole)
        assert len(asked) == 3


class TestMaxSensitivity:
    def test_gradient_of_a_linear_model_never_changes(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(432, 2)).eval()
        assert max_sensitivity(gradient, model, X).tolist() == pytest.approx([0, 0, 0], abs=1e-6)

    def test_by_hand(self):
        # The map is the input, so the largest relative change lies below the radius times sqrt(432) over its norm.
        found = max_sensitivity(the_input, net(), X, radius=0.1, samples=50)
        bound = 0.1 * 432**0.5 / X.flatten(1).norm(dim=1).double()
        assert (found < bound).all()
        assert (found > bound / 3**0.5 * 0.98).all()  # that of the mean square of a uniform number

    def test_is_deterministic_and_leaves_the_generator_alone(self):
        state = torch.random.get_rng_state()
        first = max_sensitivity(gradient, net(), X, 1)
        assert torch.equal(first, max_sensitivity(gradient, net(), X, [1, 1, 1]))
        assert not torch.equal(first, max_sensitivity(gradient, net(), X, 1, seed=5))
        torch.testing.assert_close(first[1:], max_sensitivity(gradient, net(), X[1:], 1, indices=[1, 2]))
        assert torch.equal(state, torch.random.get_rng_state())

    def test_large_maps_do_not_overflow(self):
        def large(_model, x, _target):
            return 1e25 * x

        assert max_sensitivity(large, net(), X).tolist() == pytest.approx(max_sensitivity(the_input, net(), X).tolist())

    def test_every_sample_has_neighbours_of_its_own(self):
        first, second = max_sensitivity(the_input, net(), X[:1].expand(2, -1, -1, -1)).tolist()
        assert first != second

    def test_says_what_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "captum.metrics", None)
        with pytest.raises(RelpropError, match="pip install captum"):
            max_sensitivity(gradient, net(), X)


class TestParameterRandomisation:
    def test_goes_from_the_output_down(self):
        model = net()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        result = parameter_randomisation(gradient, model, X)
        assert list(result) == ["5", "2", "0"]
        assert all(value.shape == (3,) and (value < 0.9).all() for value in result.values())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks for m in model.modules())

    def test_follows_the_calls_and_not_the_names(self):
        class Crossed(nn.Module):
            def __init__(self):
                super().__init__()
                self.last, self.first = nn.Linear(20, 3), nn.Linear(432, 20)

            def forward(self, x):
                return self.last(self.first(x.flatten(1)).relu())

        assert list(parameter_randomisation(gradient, Crossed().eval(), X)) == ["last", "first"]

    def test_a_map_of_the_image_fails_the_test(self):
        result = parameter_randomisation(the_input, net(), X, layers=["0", "5"], kind="ssim")
        assert list(result) == ["5", "0"]
        assert all(value.tolist() == pytest.approx([1, 1, 1]) for value in result.values())

    def test_layers_are_randomised_with_what_is_in_them(self):
        model = nn.Sequential(net()[:4], net()[4:]).eval()
        seen = []

        def method(model, x, target):
            seen.append([value.clone() for value in model.parameters()])
            return gradient(model, x, target)

        result = parameter_randomisation(method, model, X, layers=["0", "1"])
        assert list(result) == ["1", "0"]
        changed = [[not torch.equal(a, b) for a, b in zip(seen[0], now, strict=True)] for now in seen[1:]]
        assert changed == [[False] * 4 + [True] * 2, [True] * 6]

    @pytest.mark.parametrize(
        ("steps", "looks"), [(1, ["0"]), (2, ["5", "0"]), (3, ["5", "2", "0"]), (9, ["5", "2", "0"])]
    )
    def test_a_few_looks_see_the_same_cascade(self, steps, looks):
        every = parameter_randomisation(gradient, net(), X)
        some = parameter_randomisation(gradient, net(), X, steps=steps)
        assert list(some) == looks
        assert all(torch.equal(some[name], every[name]) for name in looks)

    def test_works_with_relprop(self):
        def method(model, x, target):
            return relprop.explain(model, x, target).relevance

        result = parameter_randomisation(method, net(), X, 1)
        assert all(torch.isfinite(value).all() for value in result.values())

    def test_refuses(self):
        with pytest.raises(RelpropError, match="no module 'fc' to randomise"):
            parameter_randomisation(gradient, net(), X, layers=["fc"])
        with pytest.raises(RelpropError, match="looked at once at least"):
            parameter_randomisation(gradient, net(), X, steps=0)
        with pytest.raises(RelpropError, match="pass one a sample"):
            parameter_randomisation(gradient, net(), X, torch.zeros(3, 2, dtype=torch.long))


class Corner(nn.Module):
    """Class 0 is as probable as the upper left quarter is bright; pixels are 1 there and -1 elsewhere."""

    def forward(self, x):
        p = (0.5 + 0.4 * x[:, 0, :6, :6].mean((1, 2))).clamp(0.01, 0.99)
        return torch.stack([p.log(), (1 - p).log()], 1)


class TestRoad:
    image = -torch.ones(2, 1, 12, 12)
    image[:, :, :6, :6] = 1
    quarter = (image[:, 0] + 1) / 2

    @pytest.fixture(autouse=True)
    def _installed(self):
        import_torchvision()

    def test_by_hand(self):
        # At the 75th percentile the most relevant quarter goes: all that is bright. What fills it is grown from the
        # dark pixels around it, so p falls from 0.9 to 0.1; without the least relevant quarter it stays at 0.9.
        found = road(Corner().eval(), self.image, self.quarter, 0, percentiles=[75])
        assert found.tolist() == pytest.approx([0.4, 0.4], abs=0.01)
        found = road(Corner().eval(), self.image, -self.quarter, 0, percentiles=[75])
        assert found.tolist() == pytest.approx([-0.4, -0.4], abs=0.01)

    def test_order_alone_matters(self):
        maps = torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(0))
        model = Corner().eval()
        assert torch.equal(road(model, self.image, maps), road(model, self.image, 100 * maps.exp()))

    def test_does_not_depend_on_batching(self):
        maps = torch.randint(3, (2, 12, 12), generator=torch.Generator().manual_seed(0)).float()
        model = Corner().eval()
        both = road(model, self.image, maps, percentiles=[50])
        untied = torch.arange(144.0).reshape(1, 12, 12).expand(2, -1, -1)
        first, second = road(model, self.image[:1].expand(2, -1, -1, -1), untied, percentiles=[60]).tolist()
        assert first != second
        assert both[1] == road(model, self.image[1:], maps[1:], percentiles=[50], indices=[1])

    def test_a_constant_map_is_worth_nothing(self):
        many = self.image[:1].expand(16, -1, -1, -1)
        found = road(Corner().eval(), many, torch.ones(16, 12, 12), 0, percentiles=[50, 80])
        assert abs(float(found.mean())) < 0.05
        assert len(set(found.tolist())) > 1

    def test_refuses(self, monkeypatch):
        with pytest.raises(RelpropError, match="between 0 and 100"):
            road(Corner().eval(), self.image, self.quarter, percentiles=[0])
        with pytest.raises(RelpropError, match=r"images \(B, C, H, W\)"):
            road(nn.Linear(4, 2).eval(), torch.zeros(1, 4), torch.zeros(1, 4))
        monkeypatch.setitem(sys.modules, "pytorch_grad_cam.metrics.road", None)
        with pytest.raises(RelpropError, match="pip install grad-cam"):
            road(Corner().eval(), self.image, self.quarter)
