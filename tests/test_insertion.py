import gc
import math
import weakref
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from relprop.errors import RelpropError
from relprop.heatmap import heat_quantization
from relprop.metrics import InsertionDeletion, Scorer, insertion_deletion
from relprop.metrics.curves import BOUND
from relprop.metrics.ranking import Ranking
from relprop.metrics.remembering import Remembering
from relprop.metrics.scorer import _KNOWN, fastest

PLAIN = ((0.0,), (1.0,))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Known(nn.Module):
    """Class 0 has the probability 0.1 + 0.8 times the weights of the pixels that are one; class 1 has the rest."""

    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", weights / weights.sum())

    def forward(self, x):
        p = 0.1 + 0.8 * (x[:, 0] * self.weights).flatten(1).sum(1)
        return torch.stack([p.log(), (1 - p).log()], 1)


class Step(nn.Module):
    """Class 0 has the probability 0.9 if all pixels of a set are one, else 0.2."""

    def __init__(self, members):
        super().__init__()
        self.register_buffer("members", members)

    def forward(self, x):
        p = torch.where((x[:, 0] * self.members).flatten(1).sum(1) >= self.members.sum(), 0.9, 0.2)
        return torch.stack([p.log(), (1 - p).log()], 1)


class Counting:
    """A scorer that remembers every image it was asked for."""

    def __init__(self, model):
        self.model = model
        self.images = []

    def __call__(self, images):
        self.images += [image.numpy().tobytes() for image in images]
        return self.model(images).softmax(1)


def net(classes=5, seed=0, channels=3):
    """A small network whose batch norms have numbers of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.LazyLinear(classes),
        )
        model(torch.rand(2, channels, 16, 16))
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model.eval().requires_grad_(False)


def distinct(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randperm(math.prod(shape[1:]), generator=generator).reshape(shape[1:]).float() for _ in range(shape[0])]
    )


def ones(count=1, size=10):
    return torch.ones(count, 1, size, size, dtype=torch.float64)


def trapezoid(axis, values):
    return float(np.trapezoid(values, axis))


class TestClosedForms:
    def test_linear_model(self):
        weights = distinct(1, 10, 10).double() + 1
        model = Known(weights[0]).eval()
        scores = insertion_deletion(model, ones(), weights, 0, normalization=PLAIN, points=101)
        total = weights.flatten().sort(descending=True).values.cumsum(0) / weights.sum()
        rising = 0.1 + 0.8 * torch.cat([torch.zeros(1), total])
        axis = torch.arange(101) / 100
        torch.testing.assert_close(scores.curves.insertion.fraction[0], axis.double())
        torch.testing.assert_close(scores.curves.insertion.probability[0], rising.double())
        torch.testing.assert_close(scores.curves.deletion.probability[0], 1.0 - rising.double())
        assert float(scores.insertion) == pytest.approx(trapezoid(axis, rising))
        assert float(scores.score) == pytest.approx(2 * trapezoid(axis, rising) - 1)
        assert float(scores.spread) == 0

    def test_every_map_is_as_good_where_all_pixels_are_alike(self):
        model = Known(torch.ones(10, 10, dtype=torch.float64)).eval()
        scores = insertion_deletion(model, ones(3), torch.rand(3, 10, 10), 0, normalization=PLAIN)
        torch.testing.assert_close(scores.insertion, torch.full((3,), 0.5, dtype=torch.float64))
        torch.testing.assert_close(scores.deletion, torch.full((3,), 0.5, dtype=torch.float64))

    @pytest.mark.parametrize("ties", ["random", "stable", "block"])
    def test_step_model(self, ties):
        members = torch.zeros(10, 10, dtype=torch.float64)
        members[2:5, 3:7] = 1  # 12 pixels
        model, x = Step(members).eval(), ones()
        heatmap = distinct(1, 10, 10) + 1000 * members
        scores = insertion_deletion(model, x, heatmap, 0, normalization=PLAIN, points=101, ties=ties)
        inserted = [0.9 if k >= 12 else 0.2 for k in range(101)]
        deleted = [0.9 if k == 0 else 0.2 for k in range(101)]
        torch.testing.assert_close(scores.curves.insertion.probability[0], torch.tensor(inserted).double())
        torch.testing.assert_close(scores.curves.deletion.probability[0], torch.tensor(deleted).double())
        assert float(scores.insertion) == pytest.approx(0.9 - 0.7 * 0.115)
        assert float(scores.deletion) == pytest.approx(0.2 + 0.7 * 0.005)

    def test_step_model_with_the_members_tied(self):
        members = torch.zeros(10, 10, dtype=torch.float64)
        members[2:5, 3:7] = 1
        model, x = Step(members).eval(), ones()
        ask = {"normalization": PLAIN, "points": 101}
        block = insertion_deletion(model, x, members[None], 0, ties="block", **ask)
        # All members are in at once, then all others: three points, 0, 12 and 100 pixels.
        assert sorted(set(block.curves.insertion.fraction[0].tolist())) == [0.0, 0.12, 1.0]
        assert float(block.insertion) == pytest.approx(0.9 - 0.7 * 0.06)
        assert float(block.deletion) == pytest.approx(0.2 + 0.7 * 0.06)
        random = insertion_deletion(model, x, members[None], 0, **ask)
        assert float(random.insertion) == pytest.approx(0.9 - 0.7 * 0.115)  # no order of the members changes that
        assert float(random.spread) == pytest.approx(0)

    def test_stable_ties_go_by_index(self):
        weights = distinct(1, 10, 10).double() + 1
        model = Known(weights[0]).eval()
        constant = insertion_deletion(
            model, ones(), torch.zeros(1, 10, 10), 0, normalization=PLAIN, ties="stable", points=101
        )
        total = torch.cat([torch.zeros(1), weights.flatten().cumsum(0) / weights.sum()])
        torch.testing.assert_close(constant.curves.insertion.probability[0], 0.1 + 0.8 * total.double())


class TestInvariance:
    model, x = net(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("ties", ["random", "stable", "block"])
    @pytest.mark.parametrize("transform", [lambda m: 3 * m - 7, lambda m: m.exp(), lambda m: m**3, torch.atan])
    def test_strictly_increasing_transforms(self, ties, transform):
        maps = (torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)) * 4).round().double() / 4
        ask = {"ties": ties, "normalization": IMAGENET}
        before = insertion_deletion(self.model, self.x, maps, **ask)
        after = insertion_deletion(self.model, self.x, transform(maps), **ask)
        assert torch.equal(before.score, after.score)
        assert torch.equal(before.curves.insertion.probability, after.curves.insertion.probability)

    def test_constant_map_is_a_random_map(self):
        order = np.random.default_rng([11, 0]).permutation(256)
        control = torch.empty(256)
        control[order] = torch.arange(256, 0, -1.0)
        ask = {"seeds": [11], "normalization": IMAGENET}
        constant = insertion_deletion(self.model, self.x[:1], torch.ones(1, 16, 16), **ask)
        random = insertion_deletion(self.model, self.x[:1], control.reshape(1, 16, 16), **ask)
        assert torch.equal(constant.insertion, random.insertion)
        assert torch.equal(constant.deletion, random.deletion)

    def test_constant_map_scores_like_random_maps(self):
        ask = {"normalization": IMAGENET, "points": 11}
        constant = insertion_deletion(self.model, self.x[:1], torch.zeros(1, 16, 16), seeds=60, **ask)
        many = self.x[:1].expand(60, -1, -1, -1)
        random = insertion_deletion(
            self.model, many, distinct(60, 16, 16), target=int(self.model(self.x).argmax()), **ask
        )
        error = float(random.score.std()) * (2 / 60) ** 0.5
        assert abs(float(constant.score) - float(random.score.mean())) < 4 * error
        assert float(constant.spread) == pytest.approx(float(random.score.std()), rel=0.5)

    def test_ends_are_exact(self):
        scores = insertion_deletion(self.model, self.x, torch.rand(2, 16, 16), normalization=IMAGENET)
        black = (-torch.tensor(IMAGENET[0]) / torch.tensor(IMAGENET[1])).reshape(1, 3, 1, 1).expand(1, 3, 16, 16)
        full, empty = self.model(self.x).softmax(1), self.model(black).softmax(1)[0]
        for i, target in enumerate(full.argmax(1)):
            assert scores.curves.insertion.probability[i, [0, -1]].tolist() == pytest.approx(
                [float(empty[target]), float(full[i, target])], abs=1e-6
            )
            assert scores.curves.deletion.probability[i, [0, -1]].tolist() == pytest.approx(
                [float(full[i, target]), float(empty[target])], abs=1e-6
            )
        for curve in scores.curves:
            assert curve.fraction[:, 0].tolist() == [0, 0]
            assert curve.fraction[:, -1].tolist() == [1, 1]


class TestTies:
    model, x = net(), torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    @given(levels=st.integers(1, 12), points=st.integers(2, 40), seed=st.integers(0, 100))
    def test_block_ties_are_those_of_brute_force(self, levels, points, seed):
        heatmap = torch.randint(levels, (1, 16, 16), generator=torch.Generator().manual_seed(seed)).float()
        scores = insertion_deletion(
            self.model, self.x[:1], heatmap, 2, ties="block", baseline=0.0, points=points, scorer=None
        )
        ranked = sorted(heatmap.flatten().tolist(), reverse=True)
        areas = []
        for insert in (True, False):
            curve = []
            for i in range(points):
                k = round(i * 256 / (points - 1))
                inside = heatmap >= ranked[k - 1] if k else heatmap > ranked[0]
                image = self.x[:1] * (inside if insert else ~inside)
                curve.append((float(inside.float().mean()), float(self.model(image).softmax(1)[0, 2])))
            areas.append(trapezoid(*zip(*curve, strict=True)))
        assert float(scores.insertion) == pytest.approx(areas[0], abs=1e-6)
        assert float(scores.deletion) == pytest.approx(areas[1], abs=1e-6)

    def test_random_ties_are_the_mean_over_seeds(self):
        maps = (torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(3)) * 5).floor()
        ask = {"normalization": IMAGENET}
        each = [insertion_deletion(self.model, self.x, maps, seeds=[seed], **ask) for seed in (4, 5, 6, 7)]
        together = insertion_deletion(self.model, self.x, maps, seeds=[4, 5, 6, 7], **ask)
        scores = torch.stack([one.score for one in each])
        torch.testing.assert_close(together.score, scores.mean(0))
        torch.testing.assert_close(together.spread, scores.std(0))
        assert (together.spread > 0).all()

    def test_random_ties_do_not_depend_on_batching(self):
        maps = (torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(3)) * 5).floor()
        ask = {"normalization": IMAGENET, "seeds": 2}
        whole = insertion_deletion(self.model, self.x, maps, **ask)
        again = insertion_deletion(self.model, self.x, maps, batch_size=7, **ask)
        last = insertion_deletion(self.model, self.x[2:], maps[2:], indices=[2], **ask)
        other = insertion_deletion(self.model, self.x[2:], maps[2:], indices=[3], **ask)
        torch.testing.assert_close(whole.score, again.score, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole.score[2:], last.score, rtol=0, atol=1e-6)
        assert not torch.allclose(last.score, other.score, rtol=0, atol=1e-6)

    def test_all_ties_agree_where_there_are_none(self):
        maps = distinct(3, 16, 16)
        all_ = [
            insertion_deletion(self.model, self.x, maps, ties=ties, normalization=IMAGENET)
            for ties in ("random", "stable", "block")
        ]
        assert torch.equal(all_[0].score, all_[1].score)
        assert torch.equal(all_[0].score, all_[2].score)
        assert {scores.forwards for scores in all_} == {3 + 1 + 3 * 2 * 24}  # images, black, the points between

    def test_ranking_is_stable(self):
        values = torch.randint(3, (1, 5000), generator=torch.Generator().manual_seed(0)).float()
        order = sorted(range(5000), key=lambda i: -float(values[0, i]))
        assert Ranking(values, "stable").positions(0, 0)[order].tolist() == list(range(5000))

    def test_ranking_by_hand(self):
        values = torch.tensor([[1.0, 3.0, 1.0, 2.0, 3.0]])
        assert Ranking(values, "stable").positions(0, 0).tolist() == [3, 0, 4, 2, 1]
        block = Ranking(values, "block")
        assert block.positions(0, 0).tolist() == [3, 0, 3, 2, 0]
        assert [block.count(0, k) for k in range(6)] == [0, 2, 2, 3, 5, 5]
        random = Ranking(values, "random", seeds=(0, 1))
        assert [random.variants(0, k) for k in range(6)] == [1, 2, 1, 1, 2, 1]
        assert random.positions(0, 0).tolist() in (
            [[a, b, c, 2, d] for a, c in ((3, 4), (4, 3)) for b, d in ((0, 1), (1, 0))]
        )


def published(model, x, heatmap, label, mean, std, step=500):
    """The published protocol for one image, written down from its description alone."""
    pixels = x.double() * std[:, None, None] + mean[:, None, None]
    if heatmap.ndim == 3:
        heatmap = heatmap[0]
    values = heatmap.flatten().tolist()
    ranked = sorted(values, reverse=True)
    areas = []
    for insert in (True, False):
        curve = []
        for i in range(-(-len(values) // step)):
            rank = step * (i + 1)
            threshold = ranked[rank] if rank < len(values) else ranked[-1]
            moved = torch.tensor([float(value >= threshold) for value in values]).reshape(heatmap.shape)
            image = pixels * (moved if insert else 1 - moved)
            image = (image - mean[:, None, None]) / std[:, None, None]
            curve.append(float(model(image[None].to(x.dtype)).softmax(1)[0, label]))
        trapezoids = [(a + b) / 2 for a, b in pairwise(curve)]
        areas.append(sum(trapezoids) / len(trapezoids))
    return areas


class TestPublishedProtocol:
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in IMAGENET)

    @pytest.mark.parametrize("step", [50, 51, 255])
    @pytest.mark.parametrize("kind", ["raw", "quantized", "channels", "constant"])
    def test_is_the_literal_reference(self, kind, step):
        model, x = net(), torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        raw = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
        maps = {
            "raw": raw.sum(1),
            "quantized": heat_quantization(raw.sum(1), edges="released"),
            "channels": raw,
            "constant": torch.ones(3, 16, 16),
        }[kind]
        labels = [4, 0, 2]
        scores = insertion_deletion(
            model, x, maps, scored=labels, normalization=IMAGENET, protocol="otsuki2024", step=step
        )
        for i, label in enumerate(labels):
            insertion, deletion = published(model, x[i], maps[i], label, self.mean, self.std, step)
            assert float(scores.insertion[i]) == pytest.approx(insertion, abs=1e-6)
            assert float(scores.deletion[i]) == pytest.approx(deletion, abs=1e-6)
            assert float(scores.score[i]) == pytest.approx(insertion - deletion, abs=1e-6)

    def test_has_101_points_of_which_the_first_has_501_pixels(self):
        seen = []

        def scorer(images):
            seen.extend((images[:, 0] != 0).flatten(1).sum(1).tolist())
            return torch.full((len(images), 2), 0.5)

        x = torch.ones(1, 1, 224, 224)
        scores = insertion_deletion(
            None, x, distinct(1, 224, 224), 0, normalization=PLAIN, protocol="otsuki2024", scorer=scorer
        )
        inserted = [501 + 500 * i for i in range(100)]
        assert seen == [224**2, 0, *inserted, *(224**2 - k for k in inserted)]
        assert scores.curves.insertion.probability.shape == (1, 101)
        torch.testing.assert_close(scores.curves.insertion.fraction[0], torch.linspace(0, 1, 101).double())
        assert float(scores.insertion) == pytest.approx(0.5)

    def test_fewer_points_are_points_of_the_same_curve(self):
        model, x = net(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        ask = {"normalization": IMAGENET, "protocol": "otsuki2024", "step": 6}
        every = insertion_deletion(model, x, distinct(2, 16, 16), 0, **ask).curves.deletion
        some = insertion_deletion(model, x, distinct(2, 16, 16), 0, points=15, **ask).curves.deletion
        assert every.fraction.shape == (2, 43)
        torch.testing.assert_close(some.fraction, every.fraction[:, ::3])
        torch.testing.assert_close(some.probability, every.probability[:, ::3], rtol=0, atol=1e-6)

    def test_a_list_of_points_adds_both_ends(self):
        model, x = net(), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        every = insertion_deletion(model, x, distinct(1, 16, 16), 0, normalization=IMAGENET, points=257).curves
        some = insertion_deletion(model, x, distinct(1, 16, 16), 0, normalization=IMAGENET, points=[40, 3, 900]).curves
        for kind in ("insertion", "deletion"):
            found, known = getattr(some, kind), getattr(every, kind)
            assert (found.fraction * 256).tolist() == [[0, 3, 40, 256]]
            torch.testing.assert_close(found.probability, known.probability[:, [0, 3, 40, 256]], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("points", [[], [-1], [2.5], [True], True, "many", {3: 4}])
    def test_other_points_are_refused(self, points):
        with pytest.raises(RelpropError, match="points is"):
            insertion_deletion(net(), torch.randn(1, 3, 16, 16), distinct(1, 16, 16), points=points)

    def test_fixes_what_it_fixes(self):
        model, x = net(), torch.randn(1, 3, 16, 16)
        with pytest.raises(RelpropError, match="settles ties"):
            insertion_deletion(model, x, x, normalization=IMAGENET, protocol="otsuki2024", ties="stable")
        with pytest.raises(RelpropError, match="settles ties"):
            insertion_deletion(model, x, x, normalization=IMAGENET, protocol="otsuki2024", points=[3, 4])
        with pytest.raises(RelpropError, match="one point of 500"):
            insertion_deletion(model, x, x, normalization=IMAGENET, protocol="otsuki2024")


class TestCost:
    def test_each_distinct_mask_is_scored_once(self):
        model, x = net(), torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        maps = (torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(2)) * 6).floor()
        maps[0] = 1
        maps[1] = distinct(1, 16, 16)[0]
        for ties in ("random", "stable", "block"):
            scorer = Counting(model)
            scores = insertion_deletion(model, x, maps, ties=ties, normalization=IMAGENET, scorer=scorer)
            assert len(set(scorer.images)) == len(scorer.images) == scores.forwards

    def test_what_was_scored_is_remembered(self):
        model, x = net(), torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        scorer = Counting(model)
        remembering = Remembering(scorer)
        for images in (x[[0, 1, 0]], x[[1, 2]], x.contiguous(memory_format=torch.channels_last), x):
            torch.testing.assert_close(remembering(images), model(images).softmax(1), rtol=0, atol=1e-6)
        assert len(scorer.images) == 4

    @pytest.mark.parametrize("protocol", [None, "otsuki2024"])
    def test_quantised_maps_cost_sixteen_forwards(self, protocol):
        model, x = net(), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        raw = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(2))
        maps = heat_quantization(raw, edges="released")
        ask = {"ties": "block", "points": 101} if protocol is None else {"protocol": protocol, "step": 3}
        scorer = Counting(model)
        insertion_deletion(model, x, maps, 1, normalization=IMAGENET, scorer=scorer, **ask)
        assert len(scorer.images) <= 16

    def test_seeds_cost_only_where_they_differ(self):
        model, x = net(), torch.randn(1, 3, 16, 16)
        half = distinct(1, 16, 16).clamp_min(128)  # the lower half ties, as behind a ReLU
        scores = insertion_deletion(model, x, half, normalization=IMAGENET, points=5, seeds=3)
        # 64 and 128 pixels (the 128 highest are apart: 127 above the tie and one of the tie, which splits it)
        assert scores.forwards == 1 + 1 + 2 * (1 + 3 + 3)

    def test_images_are_batched_across_samples(self):
        model, x = net(), torch.randn(5, 3, 16, 16)
        sizes = []

        def scorer(images):
            sizes.append(len(images))
            return model(images).softmax(1)

        insertion_deletion(model, x, distinct(5, 16, 16), normalization=IMAGENET, scorer=scorer, batch_size=50)
        assert sizes == [5, 1, 50, 50, 50, 50, 40]


class TestOptions:
    model, x = net(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    maps = distinct(2, 16, 16)

    def test_scored_class(self):
        predicted = self.model(self.x).argmax(1)
        ask = {"normalization": IMAGENET}
        default = insertion_deletion(self.model, self.x, self.maps, **ask)
        told = insertion_deletion(self.model, self.x, self.maps, predicted, **ask)
        truth = insertion_deletion(self.model, self.x, self.maps, predicted, scored=[3, 1], **ask)
        other = insertion_deletion(self.model, self.x, self.maps, target=[3, 1], **ask)
        assert torch.equal(default.score, told.score)
        assert torch.equal(truth.score, other.score)
        assert not torch.equal(truth.score, told.score)

    def test_several_classes_cost_one(self):
        pair = torch.tensor([[3, 0], [1, 4]])
        ask = {"normalization": IMAGENET, "seeds": 2}
        tied = heat_quantization(self.maps)
        both = insertion_deletion(self.model, self.x, tied, scored=pair, **ask)
        assert both.score.shape == both.spread.shape == (2, 2)
        assert both.curves.insertion.probability.shape == (2, 2, 26)
        for i in range(2):
            one = insertion_deletion(self.model, self.x, tied, scored=pair[:, i], **ask)
            mine = both.only(i)
            assert one.forwards == mine.forwards == both.forwards
            for name in ("insertion", "deletion", "score", "spread"):
                torch.testing.assert_close(getattr(mine, name), getattr(one, name))
            torch.testing.assert_close(mine.curves.deletion.probability, one.curves.deletion.probability)

    def test_black_is_the_loaded_models(self):
        loaded = SimpleNamespace(module=self.model, normalization=IMAGENET)
        known = insertion_deletion(loaded, self.x, self.maps)
        told = insertion_deletion(self.model, self.x, self.maps, normalization=IMAGENET)
        pixel = (-torch.tensor(IMAGENET[0]) / torch.tensor(IMAGENET[1]))[:, None, None]
        tensor = insertion_deletion(self.model, self.x, self.maps, baseline=pixel)
        torch.testing.assert_close(known.score, told.score)
        torch.testing.assert_close(known.score, tensor.score, rtol=0, atol=1e-6)

    def test_mean_is_zero(self):
        mean = insertion_deletion(self.model, self.x, self.maps, baseline="mean", normalization=IMAGENET)
        zero = insertion_deletion(self.model, self.x, self.maps, baseline=torch.zeros(3, 16, 16))
        assert torch.equal(mean.score, zero.score)

    def test_a_baseline_for_each_sample(self):
        baseline = torch.randn(2, 3, 16, 16)
        both = insertion_deletion(self.model, self.x, self.maps, baseline=baseline)
        second = insertion_deletion(self.model, self.x[1:], self.maps[1:], baseline=baseline[1])
        torch.testing.assert_close(both.score[1:], second.score, rtol=0, atol=1e-6)
        assert both.forwards == 2 + 2 + 2 * 2 * 24

    def test_blur_keeps_flat_images_and_spreads_points(self):
        from relprop.metrics.baselines import baseline_of

        flat = torch.full((1, 3, 20, 20), 0.7, dtype=torch.float64)
        torch.testing.assert_close(baseline_of("blur", flat), flat)
        point = torch.zeros(1, 1, 31, 31, dtype=torch.float64)
        point[0, 0, 15, 15] = 1
        blurred = baseline_of("blur", point)[0, 0]
        assert float(blurred.sum()) == pytest.approx(1)
        assert (blurred > 0).sum() == 11 * 11
        assert float(blurred[15, 20] / blurred[15, 15]) == pytest.approx(math.exp(-0.5))

    def test_channels_are_summed_unless_told(self):
        relevance = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))
        ask = {"normalization": IMAGENET}
        for reduce, maps in ((None, relevance.sum(1)), ("first", relevance[:, 0]), ("abs", relevance.abs().sum(1))):
            expected = insertion_deletion(self.model, self.x, maps, **ask)
            assert torch.equal(
                insertion_deletion(self.model, self.x, relevance, reduce=reduce, **ask).score, expected.score
            )
        own = insertion_deletion(self.model, self.x, relevance, reduce=lambda maps: maps[:, 2], **ask)
        assert torch.equal(own.score, insertion_deletion(self.model, self.x, relevance[:, 2], **ask).score)

    def test_step_in_pixels(self):
        scores = insertion_deletion(self.model, self.x, self.maps, normalization=IMAGENET, step=100)
        assert scores.curves.insertion.fraction[0].tolist() == [0, 100 / 256, 200 / 256, 1]

    def test_patches_move_together(self):
        coarse = distinct(2, 4, 4)
        fine = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)
        ask = {"normalization": IMAGENET, "points": 17}
        patches = insertion_deletion(self.model, self.x, fine, patch=4, **ask)
        blocks = insertion_deletion(self.model, self.x, fine, ties="block", **ask)
        torch.testing.assert_close(patches.score, blocks.score, rtol=0, atol=1e-6)

    def test_other_dimensions(self):
        flat = nn.Linear(12, 3).eval()
        scores = insertion_deletion(flat, torch.rand(2, 12), torch.rand(2, 12), baseline=0.0)
        assert scores.score.shape == (2,)
        series = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(30, 3)).eval()
        x = torch.rand(2, 2, 12)
        torch.testing.assert_close(
            insertion_deletion(series, x, x, baseline=0.0, patch=3).score,
            insertion_deletion(series, x, x.sum(1), baseline=0.0, patch=3).score,
        )

    def test_float64_and_untouched(self):
        model = deepcopy(self.model).double().requires_grad_()
        before = deepcopy(model.state_dict())
        x, maps = self.x.double().requires_grad_(), self.maps.clone().requires_grad_()
        scores = insertion_deletion(model, x, maps, normalization=IMAGENET)
        single = insertion_deletion(self.model, self.x, self.maps, normalization=IMAGENET)
        torch.testing.assert_close(scores.score, single.score, rtol=0, atol=1e-5)
        assert not scores.score.requires_grad
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class TestAdaptive:
    @pytest.mark.parametrize("sharpness", [1.0, 8.0, 60.0])
    @pytest.mark.parametrize("middle", [0.05, 0.3, 0.8])
    def test_finds_where_a_curve_bends(self, sharpness, middle):
        def scorer(images):
            fraction = images[:, 0].flatten(1).mean(1)
            p = torch.sigmoid(sharpness * (fraction - middle))
            return torch.stack([p, 1 - p], 1)

        x, maps = torch.ones(2, 1, 40, 40), distinct(2, 40, 40)
        ask = {"normalization": PLAIN, "scorer": scorer}
        exact = insertion_deletion(None, x, maps, 0, points=1601, **ask)
        adaptive = insertion_deletion(None, x, maps, 0, points="adaptive", **ask)
        torch.testing.assert_close(adaptive.insertion, exact.insertion, rtol=0, atol=0.003)
        torch.testing.assert_close(adaptive.deletion, exact.deletion, rtol=0, atol=0.003)
        assert adaptive.curves.insertion.fraction.shape[1] <= 30
        assert adaptive.forwards <= 2 + 1 + 2 * 2 * 28

    @pytest.mark.parametrize("jump", [0.37, 2.0])
    def test_looks_where_something_happens(self, jump):
        def scorer(images):
            p = torch.where(images[:, 0].flatten(1).mean(1) < jump, 0.2, 0.9)
            return torch.stack([p, 1 - p], 1)

        x, maps = torch.ones(1, 1, 40, 40), distinct(1, 40, 40)
        scores = insertion_deletion(None, x, maps, 0, points="adaptive", normalization=PLAIN, scorer=scorer)
        fraction = scores.curves.insertion.fraction[0]
        far = fraction[(fraction - jump).abs() > 0.25]
        assert {round(f, 2) for f in far.tolist()} <= {0.0, 0.04, 0.15, 0.31, 0.5, 0.69, 0.85, 0.96, 1.0}
        if jump > 1:
            assert scores.forwards == 2 + 2 * 7
        else:
            assert fraction[fraction < jump].max() == pytest.approx(0.36)
            assert fraction[fraction >= jump].min() == pytest.approx(0.37)

    def test_knows_how_rough_a_curve_is(self):
        # Random walks are what the estimate takes curves for; where it is too low it stops, so 2 is allowed.
        walks = torch.randn(40, 101, generator=torch.Generator().manual_seed(0)).mul(0.02).cumsum(1).add(0.5)

        def scorer(images):
            which, fraction = images[:, 0, 0, 0].long(), (images[:, 0] > 0).double().flatten(1).mean(1)
            p = walks[which - 1, (100 * fraction).round().long()].clamp(0, 1)
            return torch.stack([p, 1 - p], 1)

        x = torch.arange(1.0, 41)[:, None, None, None].expand(40, 1, 10, 10)
        maps = torch.arange(100.0).reshape(1, 10, 10).neg().expand(40, 10, 10)  # the pixel that tells enters first
        ask = {"normalization": PLAIN, "scorer": scorer, "batch_size": 512}
        exact = insertion_deletion(None, x, maps, 0, points=101, **ask)
        adaptive = insertion_deletion(None, x, maps, 0, points="adaptive", **ask)
        error = (adaptive.insertion - exact.insertion).abs()
        assert BOUND / 2 < float(error.square().mean().sqrt()) < 2 * BOUND
        assert float(error.quantile(0.95)) < 0.005
        assert adaptive.forwards < exact.forwards / 2
        for i in range(40):
            points = dict(zip(*(values[i].tolist() for values in exact.curves.insertion), strict=True))
            some = zip(*(values[i].tolist() for values in adaptive.curves.insertion), strict=True)
            assert all(points[fraction] == probability for fraction, probability in some)

    def test_finds_blocks_below_the_first_point(self):
        model, x = net(), torch.randn(1, 3, 40, 40, generator=torch.Generator().manual_seed(1))
        maps = torch.zeros(1, 40, 40)
        maps[0, 0] = torch.arange(40.0)
        model = nn.Sequential(nn.AdaptiveAvgPool2d(16), model).eval()
        ask = {"ties": "block", "normalization": IMAGENET}
        exact = insertion_deletion(model, x, maps, points=101, **ask)
        adaptive = insertion_deletion(model, x, maps, points="adaptive", **ask)
        assert len(set(exact.curves.insertion.fraction[0].tolist())) == 4
        torch.testing.assert_close(adaptive.score, exact.score, rtol=0, atol=1e-3)

    @pytest.mark.parametrize("ties", ["random", "stable", "block"])
    def test_with_ties(self, ties):
        model, x = net(), torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        maps = (torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(2)) * 6).floor()
        maps[0] = 0
        maps[1] = (torch.arange(256).reshape(16, 16) == 7).float()
        ask = {"ties": ties, "normalization": IMAGENET}
        adaptive = insertion_deletion(model, x, maps, points="adaptive", **ask)
        exact = insertion_deletion(model, x, maps, points=257, **ask)
        torch.testing.assert_close(adaptive.score, exact.score, rtol=0, atol=0.02)
        for curve in adaptive.curves:
            assert (curve.fraction.diff(dim=1) >= 0).all()
            assert curve.fraction[:, -1].tolist() == [1, 1, 1]


class TestMetric:
    def test_is_the_function_over_batches(self):
        model, x = net(), torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        maps = (torch.rand(5, 16, 16, generator=torch.Generator().manual_seed(2)) * 6).floor()
        metric = InsertionDeletion(model, normalization=IMAGENET, seeds=2)
        metric.update(x[:2], maps[:2], [1, 2])
        metric.update(x[2:], maps[2:], 3)
        whole = insertion_deletion(model, x, maps, [1, 2, 3, 3, 3], normalization=IMAGENET, seeds=2)
        result = metric.compute()
        assert result["images"] == 5
        for name in ("insertion", "deletion", "score", "spread"):
            assert result[name] == pytest.approx(float(getattr(whole, name).mean()), abs=1e-4)
        metric.reset()
        with pytest.raises(RelpropError, match="call update"):
            metric.compute()


class TestScorer:
    @pytest.mark.parametrize("engine", ["eager", "folded", "frozen", "auto", "steady"])
    def test_engines_agree(self, engine, torchvision_model):
        model = torchvision_model("resnet18")
        before = deepcopy(model.state_dict())
        x = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(1))
        scorer = Scorer(model, x[:3], engine=engine, chunk=2)
        assert scorer.engine == {"auto": scorer.engine, "steady": "frozen"}.get(engine, engine)
        assert scorer.error <= 1e-4
        torch.testing.assert_close(scorer(x), model(x).softmax(1).detach(), rtol=0, atol=1e-4)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks for m in model.modules())

    def test_bf16_is_asked_for(self):
        model, x = net(), torch.randn(4, 3, 16, 16)
        scorer = Scorer(model, x, precision="bf16")
        assert scorer.engine.endswith("-bf16")
        assert scorer(x).dtype == torch.float32
        torch.testing.assert_close(scorer(x), model(x).softmax(1).detach(), rtol=0, atol=1e-2)

    def test_what_cannot_be_traced_is_scored_eagerly(self):
        class Branching(nn.Module):
            def forward(self, x):
                return x.flatten(1)[:, :3] * (1 if len(x) > 2 else 2) if x.sum() > 0 else x.flatten(1)[:, :3] + 1

        x = torch.randn(4, 3, 8, 8)
        scorer = Scorer(Branching().eval(), x)
        torch.testing.assert_close(scorer(x), Branching()(x).softmax(1))
        with pytest.raises(RelpropError, match="'frozen' cannot compute Branching"):
            Scorer(Branching().eval(), torch.rand(4, 3, 8, 8), engine="frozen")

    def test_is_known_for_as_long_as_the_model(self):
        model, x = net(), torch.randn(4, 3, 16, 16)
        assert fastest(model, x, forwards=10).engine == "eager"
        first = fastest(model, x)
        assert fastest(model, x, forwards=10).engine == first.engine
        with torch.no_grad():
            model[5].weight.mul_(2)
        torch.testing.assert_close(fastest(model, x)(x), model(x).softmax(1).detach(), rtol=0, atol=1e-4)
        gc.collect()  # other tests' models
        entries, alive = len(_KNOWN), weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        assert len(_KNOWN) == entries - 1

    def test_refuses(self):
        model, x = net(), torch.randn(2, 3, 16, 16)
        for message, ask in (
            ("engine 'fast' is unknown", {"engine": "fast"}),
            ("precision 'fp8' is unknown", {"precision": "fp8"}),
            ("pass a batch as example", {"example": None}),
            ("NaN", {"example": x * math.nan}),
        ):
            with pytest.raises(RelpropError, match=message):
                Scorer(model, **{"example": x, **ask})
        with pytest.raises(RelpropError, match=r"has to be a tensor \(2, classes\)"):
            Scorer(nn.Identity().eval(), engine="eager")(x)


@pytest.mark.parametrize(
    ("message", "ask"),
    [
        ("depends on how the input was normalised", {"normalization": None}),
        ("depends on how the input was normalised", {"normalization": None, "baseline": "mean"}),
        (r"pair \(mean, std\) of 3", {"normalization": (0.5, 0.5, 0.5)}),
        (r"pair \(mean, std\) of 3", {"normalization": ((0.5, 0.5), (1, 1))}),
        ("baseline 'white' is unknown", {"baseline": "white"}),
        ("broadcasts to", {"baseline": torch.zeros(5, 5)}),
        ("baseline has NaN", {"baseline": math.nan}),
        (r"maps have shape \(2, 4, 4\)", {"maps": torch.zeros(2, 4, 4)}),
        ("no order", {"maps": torch.full((2, 16, 16), math.nan)}),
        ("not by 'luck'", {"ties": "luck"}),
        ("points is 1", {"points": 1}),
        ("points is 'many'", {"points": "many"}),
        ("step is 0", {"step": 0}),
        ("no fixed step", {"step": 5, "points": "adaptive"}),
        ("patch is -1", {"patch": -1}),
        ("do not tile", {"patch": 5}),
        ("batch_size is 0", {"batch_size": 0}),
        ("seeds is 0", {"seeds": 0}),
        ("seeds is", {"seeds": [-1]}),
        ("seeds is 'a'", {"seeds": "a"}),
        ("indices has to be 2 numbers", {"indices": [1]}),
        ("indices has to be 2 numbers", {"indices": 5}),
        ("indices has to be 2 numbers", {"indices": [None, 1]}),
        ("maps are a NoneType", {"maps": None}),
        ("maps are a str", {"maps": "a"}),
        (r"maps have shape \(2, 0, 16, 16\)", {"maps": torch.zeros(2, 0, 16, 16), "reduce": "max"}),
        ("reduction gives a NoneType", {"maps": torch.zeros(2, 3, 16, 16), "reduce": lambda _: None}),
        ("scorer is 3", {"scorer": 3}),
        ("protocol 'rise' is unknown", {"protocol": "rise"}),
        ("reduction 'median' is unknown", {"reduce": "median", "maps": torch.zeros(2, 3, 16, 16)}),
        ("target 9 is out of range", {"target": 9}),
        ("pass one a sample", {"target": torch.zeros(2, 2, dtype=torch.long)}),
        ("no class number", {"scored": [0.5, 0.5]}),
        ("training mode", {"model": net().train()}),
        ("pass a torch.nn.Module", {"model": "resnet50"}),
        ("empty batch", {"x": torch.zeros(0, 3, 16, 16)}),
        ("NaN or infinite", {"x": torch.full((2, 3, 16, 16), math.inf)}),
        ("scorer's answer for 2 images is a list", {"scorer": lambda images: [1] * len(images)}),
        ("probabilities are not finite", {"scorer": lambda images: torch.full((len(images), 5), math.nan)}),
    ],
)
def test_bad_input_gets_one_sentence(message, ask):
    request = {
        "model": net(),
        "x": torch.zeros(2, 3, 16, 16),
        "maps": torch.zeros(2, 16, 16),
        "normalization": IMAGENET,
        **ask,
    }
    with pytest.raises(RelpropError, match=message) as error:
        insertion_deletion(**request)
    assert str(error.value).endswith(".")
