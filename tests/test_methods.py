"""Every method: what it gives, what it sums to, and that it leaves the model alone."""

from __future__ import annotations

import importlib
import operator
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relprop
from relprop import RelpropError, heat_quantization, methods, metrics
from relprop.heatmap import Edges
from relprop.methods import Method, cam, perturbation
from relprop.methods.captum_methods import Windows
from relprop.methods.unshared import shadow, unshared
from relprop.state import State

CHEAP: dict[str, dict[str, Any]] = {
    "integrated-gradients": {"steps": 4},
    "smoothgrad": {"samples": 3},
    "gradient-shap": {"samples": 3},
    "score-cam": {"layer": "layer1"},
    "rise": {"masks": 24, "together": 10},
    "lime": {"samples": 20, "segments": 9},
    "kernel-shap": {"samples": 20, "segments": 9},
}
TARGET = torch.tensor([3, 5])


def cheap(name: str) -> Callable[..., Tensor]:
    method = methods.get(name)
    return lambda *args, **options: method(*args, **CHEAP.get(name, {}), **options)


@pytest.fixture(scope="module")
def resnet(torchvision_model: Callable[..., nn.Module]) -> nn.Module:
    return torchvision_model("resnet18")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, x: Tensor, target: Tensor = TARGET) -> Tensor:
    with torch.no_grad():
        return model(x).gather(1, target[:, None])[:, 0]


def total(maps: Tensor) -> Tensor:
    return maps.double().sum((1, 2, 3))


# -- all of them --


def test_the_registry_has_every_method_of_the_paper_and_around_it() -> None:
    wanted = {
        *(
            "relprop",
            "paper",
            "released",
            "mixture",
            "released-mixture",
            "epsilon",
            "epsilon-plus-flat",
            "epsilon-gamma-box",
        ),
        *("i", "ii", "iii", "iv", "paper-i", "paper-ii", "paper-iii", "paper-iv", "paper-winner", "paper-2x2"),
        "paper-folded",
        *("captum-lrp", "captum-lrp-mixture", "captum-lrp-sums", "integrated-gradients", "guided-backprop", "deeplift"),
        *("gradient-x-input", "saliency", "smoothgrad", "gradient-shap", "zennit-epsilon-plus-flat"),
        *("grad-cam", "grad-cam++", "layer-cam", "full-grad", "score-cam", "rise", "lime", "kernel-shap"),
        *("random", "centre"),
    }
    assert set(methods.names()) == wanted
    for name in methods.names():
        method = methods.get(name)
        assert (method.name, bool(method.law), bool(method.citation)) == (name, True, True)
        assert method.cost >= 0


@pytest.mark.parametrize("name", methods.names())
def test_maps_have_the_promised_shape_and_the_model_is_untouched(name: str, resnet: nn.Module, images: Tensor) -> None:
    model, x = shadow(resnet, own_weights=True), images.clone()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)
    some = next(model.parameters())
    some.grad = torch.ones_like(some)
    calls: list[nn.Module] = []
    model.layer2.register_forward_hook(lambda module, _, __: calls.append(module))
    state, grads = State(model), {n: p.grad for n, p in model.named_parameters()}
    flags = [(n, p.requires_grad) for n, p in model.named_parameters()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    seeds = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002

    with torch.no_grad():  # a caller's, which gradient methods must see past
        maps = cheap(name)(model, x, TARGET)

    method = methods.get(name)
    assert maps.shape == (2, 1 if method.spatial else 3, 64, 64)
    assert maps.dtype == x.dtype
    assert maps.isfinite().all()
    assert not maps.requires_grad
    assert state.holds(model)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert {n: p.grad for n, p in model.named_parameters()} == grads
    assert some.grad is not None
    assert torch.equal(some.grad, torch.ones_like(some))
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == flags
    assert not any(module.training for module in model.modules())
    hooks = [*model.modules()]
    assert sum(len(m._forward_hooks) for m in hooks) == 1
    assert not any(m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in hooks)
    assert torch.equal(x, images)
    assert not x.requires_grad
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert np.array_equal(np.random.get_state()[1], seeds[1])  # noqa: NPY002


@pytest.mark.parametrize("name", methods.names())
def test_an_image_gets_the_same_map_alone_and_in_company(name: str, resnet: nn.Module, images: Tensor) -> None:
    # In double precision, for conventional LRP multiplies every rounding by millions.
    model, x = shadow(resnet).double(), images.double()
    together = cheap(name)(model, x, TARGET)
    alone = cheap(name)(model, x[1:], TARGET[1:])
    size = float(together[1].abs().max())
    torch.testing.assert_close(alone[0], together[1], rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("name", ["paper", "saliency", "grad-cam", "guided-backprop", "zennit-epsilon-plus-flat"])
def test_targets_may_be_given_in_every_form(name: str, resnet: nn.Module, images: Tensor) -> None:
    method = methods.get(name)
    per_sample = method(resnet, images, TARGET)
    assert torch.equal(method(resnet, images, [3, 5]), per_sample)
    assert torch.equal(method(resnet, images, 3)[0], per_sample[0])
    assert not torch.equal(method(resnet, images, 3)[1], per_sample[1])
    predicted = resnet(images).argmax(1)
    assert torch.equal(method(resnet, images), method(resnet, images, predicted))


@pytest.mark.parametrize("name", ["released", "grad-cam++", "random", "gradient-x-input"])
def test_any_method_may_be_quantized(name: str, resnet: nn.Module, images: Tensor) -> None:
    plain = methods.get(name)(resnet, images, TARGET).sum(1, keepdim=True)
    paper = methods.get(f"{name}+hq")
    assert paper.name == f"{name}+hq"
    assert torch.equal(paper(resnet, images, TARGET), relprop.heat_quantization(plain))
    released = methods.get(f"{name}+hq-released")(resnet, images, TARGET)
    assert torch.equal(released, relprop.heat_quantization(plain, edges="released"))
    assert len(released[0].unique()) <= 8


def test_a_loaded_model_and_a_frozen_one_are_explained(resnet: nn.Module, images: Tensor) -> None:
    class Loaded:
        module = shadow(resnet)  # whose parameters need no gradients

    for name in ("paper", "grad-cam", "full-grad", "saliency", "deeplift"):
        assert torch.equal(methods.get(name)(Loaded(), images, TARGET), methods.get(name)(resnet, images, TARGET))


# -- what they sum to --


def test_relprop_sums_to_the_probability(resnet: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        probability = resnet(images).double().softmax(1).gather(1, TARGET[:, None])[:, 0]
    for name in ("paper", "paper-i", "paper-ii", "paper-iii", "paper-iv"):
        torch.testing.assert_close(total(methods.get(name)(resnet, images, TARGET)), probability, rtol=1e-5, atol=0)
    for name in ("released", "i", "ii", "iii", "iv"):  # the released code loses some
        arrived = total(methods.get(name)(resnet, images, TARGET))
        assert ((arrived > 0.8 * probability) & (arrived < probability)).all()


def test_the_ablations_are_the_split_and_the_skips(resnet: nn.Module, images: Tensor) -> None:
    settings = {"i": ("symmetric", False), "ii": ("symmetric", True), "iii": ("ratio", False), "iv": ("ratio", True)}
    for name, (split, skips) in settings.items():
        for prefix, preset in (("", "released"), ("paper-", "paper")):
            expected = relprop.explain(resnet, images, TARGET, preset=preset, split=split, identity_skips=skips)
            assert torch.equal(methods.get(prefix + name)(resnet, images, TARGET), expected.relevance)
    assert torch.equal(methods.get("iv")(resnet, images, TARGET), methods.get("released")(resnet, images, TARGET))


def test_integrated_gradients_and_shap_sum_to_the_difference_to_the_baseline(resnet: nn.Module, images: Tensor) -> None:
    model, x = shadow(resnet).double(), images[:, :, :32, :32].double()
    difference = logits(model, x) - logits(model, torch.zeros_like(x))
    integrated = methods.get("integrated-gradients")(model, x, TARGET, steps=100)
    torch.testing.assert_close(total(integrated), difference, rtol=5e-2, atol=0)
    shap = methods.get("kernel-shap")(model, x, TARGET, samples=60, segments=9)
    torch.testing.assert_close(total(shap), difference, rtol=1e-3, atol=0)
    expected = methods.get("gradient-shap")(model, x, TARGET, samples=100)
    torch.testing.assert_close(total(expected), difference, rtol=0.25, atol=0)


@pytest.mark.parametrize("baseline", [0.0, -0.7])
def test_deeplift_sums_to_the_difference_to_the_baseline(baseline: float, resnet: nn.Module, images: Tensor) -> None:
    difference = logits(resnet, images) - logits(resnet, torch.full_like(images, baseline))
    maps = methods.get("deeplift")(resnet, images, TARGET, baseline=baseline)
    torch.testing.assert_close(total(maps), difference.double(), rtol=1e-3, atol=1e-6)


class Biasless(nn.Module):
    """A residual net of ReLUs in which nothing is added but activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, bias=False)
        self.body = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem(x)))
        return self.head(F.relu(self.body(x) + x).mean((2, 3)))


@pytest.fixture(scope="module")
def biasless() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Biasless().eval()


def test_without_biases_gradients_and_conventional_lrp_sum_to_the_logit(biasless: nn.Module, images: Tensor) -> None:
    for name in ("gradient-x-input", "captum-lrp-sums"):
        maps = methods.get(name)(biasless, images, TARGET)
        torch.testing.assert_close(total(maps), logits(biasless, images).double(), rtol=1e-4, atol=1e-6)
    # Sums that captum does not see are what breaks it.
    assert (total(methods.get("captum-lrp")(biasless, images, TARGET)) - logits(biasless, images)).abs().max() > 0.01


def test_zennit_sums_to_one_on_a_plain_net_without_biases(images: Tensor) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 60 * 60, 10, bias=False)).eval()
    maps = methods.get("zennit-epsilon-plus-flat")(model, images, TARGET)
    torch.testing.assert_close(total(maps), torch.ones(2, dtype=torch.float64), rtol=1e-3, atol=0)


def test_the_full_gradient_sums_to_the_logit(resnet: nn.Module, images: Tensor) -> None:
    inner, biases = cam.full_gradient(resnet, images.clone(), TARGET)
    everything = total(inner) + sum(b.double().flatten(1).sum(1) for b in biases)
    torch.testing.assert_close(everything, logits(resnet, images).double(), rtol=1e-4, atol=1e-6)


def test_grad_cam_sums_to_the_logit_without_its_bias(resnet: nn.Module, images: Tensor) -> None:
    maps, output = cam._features(shadow(resnet), images, "layer4", gradients=True)
    (gradients,) = torch.autograd.grad(output.gather(1, TARGET[:, None]).sum(), maps)
    weighed = (cam._grad_cam(maps, gradients) * maps).detach()
    torch.testing.assert_close(weighed.sum((1, 2, 3)), logits(resnet, images) - resnet.fc.bias[TARGET].detach())


class Plane(nn.Module):
    """Logits that are linear in the pixels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), self.weight.flatten(1))


def test_on_a_linear_model_everybody_agrees() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(4, 3, 12, 12), torch.randn(2, 3, 12, 12)
    model, target = Plane(weight).eval(), torch.tensor([1, 3])
    product, slope = weight[target] * x, weight[target]
    for name in ("gradient-x-input", "integrated-gradients", "gradient-shap", "deeplift"):
        torch.testing.assert_close(methods.get(name)(model, x, target), product, rtol=1e-3, atol=1e-4)
    for name in ("saliency", "smoothgrad"):
        torch.testing.assert_close(methods.get(name)(model, x, target), slope.abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(methods.get("guided-backprop")(model, x, target), slope)
    maps = methods.get("kernel-shap")(model, x, target, samples=100, segments=6)
    for group, plane, expected in zip(perturbation.superpixels(x, 6), maps[:, 0], product.sum(1), strict=True):
        for i in range(int(group.max()) + 1):  # a superpixel's Shapley value in a sum is its part of it
            torch.testing.assert_close(plane[group == i].sum(), expected[group == i].sum(), rtol=1e-3, atol=1e-3)


# -- twins --


class Traps(nn.Module):
    """Reused and in-place activations, sums that write, functions for modules, arguments with defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.tied = nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor, scale: float = 1.0, names: list[str] | None = None) -> Tensor:
        assert names is None
        h = self.relu(self.conv(x))
        skip = h
        h = self.tied(h)
        h += skip
        also = h
        h = self.relu(self.tied(F.relu(h, inplace=True)))  # also reads what the ReLU wrote
        again = self.tied(h)
        h = self.relu(again) + again  # and so does again, at a later call
        h = torch.add(h, also).relu_() + torch.tanh(also)
        h = F.max_pool2d(F.leaky_relu(h, 0.1), 3, stride=2, padding=1)
        h = F.dropout(h, 0.5, self.training) * scale
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


def in_place(twin: torch.fx.GraphModule) -> list[str]:
    nodes = [n for n in twin.graph.nodes if n.op != "call_module"]
    found = [str(n) for n in nodes if n.target in (operator.iadd, "relu_", "add_") or n.kwargs.get("inplace")]
    return found + [name for name, module in twin.named_modules() if getattr(module, "inplace", False)]


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "densenet121", "mobilenet_v2", "vgg11_bn", "shufflenet_v2_x0_5"]
)
def test_a_twin_computes_the_same_with_a_module_for_every_call(
    name: str, torchvision_model: Callable[..., nn.Module], images: Tensor
) -> None:
    model = torchvision_model(name)
    twin = unshared(model)
    with torch.no_grad():
        assert torch.equal(twin(images), model(images))
    called = [n.target for n in twin.graph.nodes if n.op == "call_module"]
    assert len(called) == len(set(called))
    assert len({id(twin.get_submodule(target)) for target in called}) == len(called)
    assert not in_place(twin)


@pytest.mark.parametrize("sums", [None, nn.Identity])
def test_a_twin_of_code_full_of_traps_computes_the_same(sums: Any, images: Tensor) -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    torch.manual_seed(0)
    model = Traps().eval()
    twin = unshared(model, sums=Add if sums else None, pools=Windows)
    with torch.no_grad():
        assert torch.equal(twin(images), model(images))
    called = [n.target for n in twin.graph.nodes if n.op == "call_module"]
    assert len(called) == len(set(called))
    assert not in_place(twin)
    kinds = [type(twin.get_submodule(target)) for target in called]
    assert (kinds.count(nn.ReLU), kinds.count(nn.Conv2d), kinds.count(Add)) == (5, 4, 4 if sums else 0)
    assert all(methods.get(name)(model, images, TARGET).isfinite().all() for name in ("guided-backprop", "deeplift"))


def test_a_shadow_shares_the_weights_and_nothing_else(resnet: nn.Module) -> None:
    twin, copy = shadow(resnet), shadow(resnet, own_weights=True)
    for mine, its, own in zip(resnet.parameters(), twin.parameters(), copy.parameters(), strict=True):
        assert mine is not its
        assert mine.data_ptr() == its.data_ptr() != own.data_ptr()
        assert not its.requires_grad
    assert not {id(m) for m in resnet.modules()} & {id(m) for m in twin.modules()}
    versions = [p._version for p in resnet.parameters()]
    with torch.no_grad():
        next(twin.parameters()).mul_(1.0)
    assert [p._version for p in resnet.parameters()] == versions


class Counting(nn.Module):
    """Counts its calls, in a buffer and beside it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.also = 0
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.also += 1
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("name", ["grad-cam", "score-cam", "saliency", "paper"])
def test_a_model_that_counts_its_calls_is_not_counted_up(name: str, images: Tensor) -> None:
    model = Counting().eval()
    methods.get(name)(model, images, 0)
    assert (float(model.calls), model.also) == (0, 0)
    metrics.class_sensitivity(methods.get(name), model, images)
    assert (float(model.calls), model.also) == (0, 0)


@pytest.mark.filterwarnings("ignore")
def test_libraries_trip_over_the_model_and_agree_with_themselves_on_its_twin(resnet: nn.Module, images: Tensor) -> None:
    captum = importlib.import_module("captum.attr")
    x = images.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="more than once"):
        captum.DeepLift(shadow(resnet)).attribute(x, target=TARGET)
    # The network as it is: where captum manages, the twin changes nothing.
    as_it_is = captum.LRP(shadow(resnet, own_weights=True)).attribute(x, target=TARGET)
    assert torch.equal(methods.get("captum-lrp")(resnet, images, TARGET), as_it_is)
    guided = captum.GuidedBackprop(shadow(resnet)).attribute(x, target=TARGET)
    assert torch.equal(methods.get("guided-backprop")(resnet, images, TARGET), guided)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((3, 2), (1, 3), (1, 0)), nn.MaxPool2d(3, 2, ceil_mode=True)],
)
def test_windows_side_by_side_are_the_pool_and_keep_deeplift_s_law(pool: nn.MaxPool2d, images: Tensor) -> None:
    x = images[:, :, :24, :27].double()
    assert torch.equal(Windows(pool)(x), pool(x))
    torch.manual_seed(0)
    width = pool(torch.zeros(1, 4, 22, 25)).numel()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(width, 10)).double().eval()
    difference = logits(model, x) - logits(model, torch.full_like(x, 0.3))
    torch.testing.assert_close(total(methods.get("deeplift")(model, x, TARGET, baseline=0.3)), difference)


def test_a_hook_sees_the_gradient_of_one_use_only(images: Tensor) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((F.relu(x) - 2 * x).mean((2, 3)))

    torch.manual_seed(0)
    model = Beside().eval()
    per_pixel = model.head.weight.detach()[TARGET][:, :, None, None] / images.shape[2:].numel()
    guided = methods.get("guided-backprop")(model, images, TARGET)
    torch.testing.assert_close(guided, (per_pixel * (images > 0)).relu() - 2 * per_pixel.expand_as(images))


def test_deeplift_refuses_what_it_would_take_for_linear(images: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(4 * 62 * 62, 10)).eval()
    with pytest.raises(RelpropError, match="does not add up"):
        methods.get("deeplift")(model, images * 5, TARGET)
    with pytest.raises(RelpropError, match="no rule for"):
        methods.get("captum-lrp")(model, images, TARGET)


# -- class activation maps --


def scaled(maps: Tensor) -> Tensor:
    low, high = maps.amin((1, 2, 3), keepdim=True), maps.amax((1, 2, 3), keepdim=True)
    return (maps - low) / (high - low)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"), [("grad-cam", "GradCAM"), ("grad-cam++", "GradCAMPlusPlus"), ("layer-cam", "LayerCAM")]
)
def test_maps_are_those_of_the_usual_library(name: str, kind: str, resnet: nn.Module, images: Tensor) -> None:
    library = importlib.import_module("pytorch_grad_cam")
    targets = importlib.import_module("pytorch_grad_cam.utils.model_targets").ClassifierOutputTarget
    model = shadow(resnet, own_weights=True).requires_grad_()
    with torch.no_grad():
        model.fc.weight *= 1e4  # the library adds 1e-6 to a denominator of squared gradients, which are tiny here
    with getattr(library, kind)(model, [model.layer3]) as theirs:
        expected = torch.from_numpy(theirs(images, [targets(int(t)) for t in TARGET]))[:, None]
    ours = methods.get(name)(model, images, TARGET, layer="layer3")
    torch.testing.assert_close(scaled(ours), scaled(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", ["probability", "softmax"])
def test_score_cam_is_its_definition_and_scores_equal_masks_once(
    weights: str, resnet: nn.Module, images: Tensor
) -> None:
    steps: list[tuple[int, int]] = []
    score_cam = methods.get("score-cam")
    ours = score_cam(
        resnet,
        images,
        TARGET,
        layer="layer2",
        weights=weights,
        progress=lambda done, all_: steps.append((done, all_)),
    )
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1]
    with torch.no_grad():
        maps, _ = cam._features(shadow(resnet), images, "layer2", gradients=False)
        dead = int((maps.flatten(2).amax(2) == 0).sum())
        assert steps[-1][1] <= maps.shape[:2].numel() - max(dead - 2, 0)
        for i in range(2):
            masks = F.interpolate(maps[i][:, None], (64, 64), mode="bilinear", align_corners=False)
            low, high = masks.amin((1, 2, 3), keepdim=True), masks.amax((1, 2, 3), keepdim=True)
            output = resnet(images[i] * torch.where(high > low, (masks - low) / (high - low), 0.0))
            scores = output[:, TARGET[i]].softmax(0) if weights == "softmax" else output.softmax(1)[:, TARGET[i]]
            expected = (scores[:, None, None, None] * masks).sum(0).relu()
            torch.testing.assert_close(ours[i], expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


def test_score_cam_and_rise_take_a_faster_scorer(resnet: nn.Module, images: Tensor) -> None:
    seen: list[int] = []

    def scorer(batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return resnet(batch).softmax(1)

    for name in ("score-cam", "rise"):
        torch.testing.assert_close(
            cheap(name)(resnet, images, TARGET, scorer=scorer), cheap(name)(resnet, images, TARGET)
        )
    assert max(seen) <= 32
    with pytest.raises(RelpropError, match="logits"):
        methods.get("score-cam")(resnet, images, TARGET, scorer=scorer, weights="softmax")
    with pytest.raises(RelpropError, match="not 'other'"):
        methods.get("score-cam")(resnet, images, TARGET, weights="other")


def test_the_last_stage_is_found(torchvision_model: Callable[..., nn.Module], images: Tensor) -> None:
    found = {name: cam.last_stage(torchvision_model(name), images) for name in ("resnet18", "resnet50", "vgg11_bn")}
    assert found == {"resnet18": "layer4", "resnet50": "layer4", "vgg11_bn": "avgpool"}
    assert cam.last_stage(torchvision_model("resnet18"), images[:, :, :32, :32]) == "layer3"
    with pytest.raises(RelpropError, match="no layer of feature maps"):
        methods.get("grad-cam")(Plane(torch.ones(10, 3, 64, 64)).eval(), images, TARGET)
    with pytest.raises(RelpropError, match="no layer 'layer9'"):
        methods.get("grad-cam")(torchvision_model("resnet18"), images, TARGET, layer="layer9")


def test_full_grad_refuses_nets_of_another_kind(images: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 62 * 62, 10)).eval()
    with pytest.raises(RelpropError, match="do not sum to its output"):
        methods.get("full-grad")(model, images, TARGET)


# -- perturbation and controls --


class Corner(nn.Module):
    """Class 1 is how bright the upper left corner is."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x[:, :, :8, :8].mean((1, 2, 3))
        return torch.stack([-bright, bright, torch.zeros_like(bright)], 1)


@pytest.mark.parametrize(("name", "options"), [("rise", {"masks": 600}), ("lime", {"samples": 200, "segments": 16})])
def test_perturbation_finds_where_the_score_comes_from(name: str, options: dict[str, int]) -> None:
    x = torch.full((1, 3, 32, 32), 2.0)
    maps = methods.get(name)(Corner().eval(), x, 1, **options)[0, 0]
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[:8, :8] = True
    assert maps[inside].mean() > maps[~inside].mean() + 2 * maps[~inside].std()
    assert inside.flatten()[maps.argmax()]


def test_superpixels_follow_colours_and_have_no_gaps() -> None:
    x = torch.zeros(2, 3, 48, 64)
    x[:, :, :, 25:] = 3.0
    x += 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    groups = perturbation.superpixels(x, 24)
    assert groups.shape == (2, 48, 64)
    assert torch.equal(groups, perturbation.superpixels(x, 24))
    for group in groups:
        assert torch.equal(group.unique(), torch.arange(int(group.max()) + 1))
        assert 12 <= int(group.max()) + 1 <= 36
        sides = [set(group[:, :25].unique().tolist()), set(group[:, 25:].unique().tolist())]
        assert not sides[0] & sides[1]


def test_the_controls_know_nothing_but_the_image(resnet: nn.Module, biasless: nn.Module, images: Tensor) -> None:
    random, centre = methods.get("random"), methods.get("centre")
    maps = random(resnet, images, TARGET)
    assert torch.equal(maps, random(biasless, images, 0))
    assert not torch.equal(maps[0], maps[1])
    assert not torch.equal(maps, random(resnet, images, TARGET, seed=1))
    assert ((maps >= 0) & (maps < 1)).all()
    assert abs(float(maps.mean()) - 0.5) < 0.02
    middle = centre(resnet, images[:, :, :, :33], TARGET)
    torch.testing.assert_close(middle, middle.flip([2, 3]))
    assert float(middle[0, 0, 31:33, 16].min()) == float(middle.max())


# -- requests that cannot be met --


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(RelpropError, match="no method 'gradcam'; the nearest are grad-cam"):
        methods.get("gradcam")
    with pytest.raises(RelpropError, match="no method 'relased'; the nearest are released"):
        methods.get("relased+hq")


def test_requests_that_cannot_be_met_are_refused_in_one_sentence(resnet: nn.Module, images: Tensor) -> None:
    saliency = methods.get("saliency")
    with pytest.raises(RelpropError, match="no option 'steps'; its options are: none"):
        saliency(resnet, images, TARGET, steps=3)
    with pytest.raises(RelpropError, match=r"images \(B, C, H, W\)"):
        saliency(resnet, images[0], TARGET)
    with pytest.raises(RelpropError, match="one class of each image, not 2"):
        saliency(resnet, images, torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(RelpropError, match="training mode"):
        saliency(nn.Sequential(nn.Flatten()), images, TARGET)
    for name in ("paper", "saliency", "guided-backprop", "grad-cam", "zennit-epsilon-plus-flat", "captum-lrp"):
        with pytest.raises(RelpropError, match="1000 is out of range"):
            methods.get(name)(resnet, images, [3, 1000])
    assert "preset" not in methods.get("paper").options
    assert set(methods.get("integrated-gradients").options) == {"steps", "baseline"}


def test_code_that_cannot_be_traced_is_refused_where_a_twin_is_needed(images: Tensor) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))

    model = Branching().eval()
    with pytest.raises(RelpropError, match="cannot be traced"):
        methods.get("guided-backprop")(model, images, 1)
    assert methods.get("saliency")(model, images, 1).isfinite().all()  # which needs none


@pytest.mark.parametrize(
    ("name", "package"), [("saliency", "captum"), ("zennit-epsilon-plus-flat", "zennit"), ("lime", "sklearn")]
)
def test_a_missing_package_is_named(
    name: str, package: str, resnet: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.import_module

    def refuse(wanted: str, *args: Any) -> Any:
        if wanted.partition(".")[0] == package:
            raise ImportError(wanted)
        return find(wanted, *args)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(RelpropError, match=rf"needs {package}; install it with pip install 'relprop\[methods\]'"):
        methods.get(name)(resnet, images, TARGET)


def test_no_package_is_imported_before_it_is_needed() -> None:
    heavy = {"captum", "zennit", "sklearn", "scipy", "pytorch_grad_cam", "torchvision"}
    code = f"import sys, relprop.methods, relprop.datasets; sys.exit(', '.join({heavy!r} & sys.modules.keys()) or None)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_method_of_one_s_own_is_found_and_checked(
    resnet: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    own = Method("mine", "own", "none", 1, "me", lambda model, x, target: x / (x - x))  # noqa: ARG005
    methods.register(own)
    assert "mine" in methods.names()
    with pytest.raises(RelpropError, match="mine gave NaN or infinite"):
        methods.get("mine")(resnet, images, TARGET)
    with pytest.raises(RelpropError, match="is taken"):
        methods.register(own)
    broken = Method("broken", "own", "none", 1, "me", lambda model, x, target: torch.cat([]))  # noqa: ARG005
    with pytest.raises(RelpropError, match="broken cannot explain ResNet"):
        broken(resnet, images, TARGET)


@pytest.mark.parametrize("suffix", ["+sum", "+hq", "+hq3", "+hq-released", "+hq3-released"])
def test_a_suffix_sums_and_quantises(suffix: str, resnet: nn.Module, images: Tensor) -> None:
    whole = methods.get("paper")(resnet, images, TARGET).sum(1, keepdim=True)
    maps = methods.get(f"paper{suffix}")(resnet, images, TARGET)
    edges: Edges = "released" if suffix.endswith("released") else "paper"
    expected = whole if suffix == "+sum" else heat_quantization(whole, 3 if "3" in suffix else 8, edges)
    torch.testing.assert_close(maps, expected)


def test_what_the_paper_leaves_open_makes_a_difference(resnet: nn.Module, images: Tensor) -> None:
    maps = {name: methods.get(name)(resnet, images, TARGET) for name in ("paper", "paper-winner", "paper-2x2")}
    assert not torch.allclose(maps["paper"], maps["paper-winner"], rtol=1e-2, atol=0)
    assert not torch.allclose(maps["paper"], maps["paper-2x2"], rtol=1e-2, atol=0)
    for name in ("paper-winner", "paper-folded"):
        torch.testing.assert_close(total(methods.get(name)(resnet, images, TARGET)), total(maps["paper"]))
