"""Every rule on every kind of linear map, every treatment of a max pool and every split, against plain formulas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import reference as ref
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import relprop
from relprop import rules

TOLERANCE = 1e-10
START = (1.0, -2.0, 0.5, 3.0)

RULES: dict[str, tuple[Any, ref.Rule]] = {
    "zplus": (rules.zplus(), ref.zplus),
    "zplus-epsilon": (rules.zplus(epsilon=1e-6), ref.zplus_stabilised(1e-6, bias=False)),
    "zplus-epsilon-bias": (rules.zplus(epsilon=1e-6, bias=True), ref.zplus_stabilised(1e-6, bias=True)),
    "epsilon": (rules.epsilon(1e-6), ref.epsilon(1e-6)),
    "epsilon-large": (rules.epsilon(0.1), ref.epsilon(0.1)),
    "gamma": (rules.gamma(0.25, epsilon=1e-6), ref.gamma(0.25, 1e-6)),
    "alpha-beta": (rules.alpha_beta(2, 1), ref.alpha_beta(2, 1)),
    "alpha-beta-epsilon": (
        rules.alpha_beta(2, 1, epsilon=1e-6, bias=True),
        ref.alpha_beta_stabilised(2, 1, 1e-6, bias=True),
    ),
    "alpha1-beta0": (rules.alpha_beta(1, 0), ref.zplus),
    "flat": (rules.flat(), ref.flat),
    "w2": (rules.w2(), ref.w2),
    "wplus": (rules.wplus(), ref.wplus),
    "zbox": (rules.zbox(-4.0, 4.5), ref.zbox(torch.tensor(-4.0), torch.tensor(4.5))),
}
CONSERVING = {"zplus", "alpha-beta", "alpha1-beta0", "flat", "w2", "wplus", "zbox"}


class Mean(nn.Module):
    """A mean written as a call, not as a module."""

    def __init__(self, axes: int | tuple[int, ...], keepdim: bool = False) -> None:
        super().__init__()
        self.axes, self.keepdim = axes, keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axes, keepdim=self.keepdim)


Layer = Callable[[], nn.Module]
WEIGHTED: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 5, 5)),
    "conv2d-padded": (lambda: nn.Conv2d(2, 4, 3, padding=2), (2, 4, 5)),
    "conv2d-strided": (lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 6, 5)),
    "conv2d-leftover": (lambda: nn.Conv2d(2, 3, 2, stride=3), (2, 7, 6)),
    "conv2d-1x1-strided": (lambda: nn.Conv2d(3, 4, 1, stride=2), (3, 5, 4)),
    "conv2d-grouped": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 4, 4)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), (4, 3, 4)),
    "conv2d-dilated": (lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2), (2, 5, 6)),
    "conv2d-same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 2), padding=1), (2, 2, 3, 4)),
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear-tokens": (lambda: nn.Linear(4, 3), (5, 4)),
}
AVERAGES: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "avg1d": (lambda: nn.AvgPool1d(3, stride=2, padding=1), (2, 8)),
    "avg2d": (lambda: nn.AvgPool2d(2), (2, 5, 5)),
    "avg2d-include-pad": (lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=True), (2, 5, 6)),
    "avg2d-exclude-pad": (lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), (2, 5, 6)),
    "avg2d-ceil": (lambda: nn.AvgPool2d(3, stride=2, ceil_mode=True), (2, 6, 6)),
    "avg2d-ceil-pad": (lambda: nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (2, 6, 6)),
    "avg2d-divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), (2, 4, 4)),
    "avg3d": (lambda: nn.AvgPool3d(2, stride=2, padding=1), (2, 3, 2, 4)),
    "adaptive1d": (lambda: nn.AdaptiveAvgPool1d(3), (2, 7)),
    "adaptive2d": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (2, 5, 7)),
    "adaptive2d-larger": (lambda: nn.AdaptiveAvgPool2d(5), (2, 2, 3)),
    "adaptive2d-none": (lambda: nn.AdaptiveAvgPool2d((None, 2)), (2, 3, 5)),
    "adaptive3d": (lambda: nn.AdaptiveAvgPool3d(2), (2, 3, 2, 3)),
    "mean-space": (lambda: Mean((2, 3)), (3, 4, 3)),
    "mean-negative-axes": (lambda: Mean((-1, -2), keepdim=True), (3, 4, 3)),
    "mean-channels": (lambda: Mean(1, keepdim=True), (3, 4, 3)),
}
MAX_POOLS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "max1d": (lambda: nn.MaxPool1d(3, stride=2), (2, 9)),
    "max2d": (lambda: nn.MaxPool2d(2), (2, 5, 6)),
    "max2d-resnet": (lambda: nn.MaxPool2d(3, stride=2, padding=1), (2, 6, 7)),
    "max2d-overlapping": (lambda: nn.MaxPool2d(3, stride=1, padding=1), (2, 4, 4)),
    "max2d-ceil": (lambda: nn.MaxPool2d(3, stride=2, ceil_mode=True), (2, 6, 6)),
    "max2d-dilated": (lambda: nn.MaxPool2d((2, 3), stride=(2, 1), padding=(1, 1), dilation=(2, 1)), (2, 5, 5)),
    "max3d": (lambda: nn.MaxPool3d(2, stride=2, padding=1), (2, 3, 2, 4)),
}
POOLED = {"winner": ref.winner, "average": ref.zplus}


def inputs(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Four samples: signed, non-negative with many zeros, nothing at all, one lit value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    x[1] = x[1].clamp(min=0)
    x[2:] = 0
    x[3].view(-1)[x[3].numel() // 2] = 1.5
    return x.clamp(-4, 4)


def weighted(make: Layer, seed: int = 0) -> nn.Module:
    """The layer with signed weights, some of them zero, one output without weights and one without positive ones."""
    torch.manual_seed(seed)
    layer = make().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
            parameter[torch.rand_like(parameter) < 0.2] = 0
        if getattr(layer, "weight", None) is not None:
            layer.weight[0] = 0
            layer.weight[1] = -layer.weight[1].abs()
    return layer.eval()


def net(layers: dict[str, nn.Module], x: Tensor) -> nn.Sequential:
    """The layers, flattened, under a linear head of three classes."""
    torch.manual_seed(0)
    body = nn.Sequential(OrderedDict(layers)).double()
    head = nn.Linear(body(x).flatten(1).shape[1], 3).double()
    return nn.Sequential(OrderedDict([*layers.items(), ("flatten", nn.Flatten()), ("head", head)])).eval()


def explain(model: nn.Module, x: Tensor, overrides: dict[Any, Any], layers: list[str]) -> relprop.Explanation:
    """From a signed start, with a head whose relevance reaches every unit, alive or dead."""
    start = torch.tensor(START, dtype=x.dtype)[: len(x)]
    overrides = {"head": rules.w2(), **overrides}
    return relprop.explain(model, x, target=1, preset="epsilon", overrides=overrides, start=start, layers=layers)


def check_layer(layer: nn.Module, x: Tensor, treatment: Any, brute: ref.Rule, matrix: ref.Map | None = None) -> None:
    """The relevance at the layer's input is the brute force of the relevance at its output."""
    model = net({"under": layer}, x)
    e = explain(model, x, {"under*": treatment}, ["under", "head"])
    head = torch.zeros(len(x), 3, dtype=x.dtype)
    head[:, 1] = torch.tensor(START, dtype=x.dtype)[: len(x)]
    with torch.no_grad():
        out = layer(x)
    assert_same(e.relevance_at("head"), ref.brute_force(ref.w2, model.head, out.flatten(1), head))
    want = ref.brute_force(brute, matrix or layer, x, e.relevance_at("head").reshape(out.shape))
    assert_same(e.relevance_at("under"), want)
    assert_same(e.relevance, want)


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max().clamp(min=1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", WEIGHTED)
def test_rule_on_weighted_layer(kind: str, rule: str) -> None:
    make, shape = WEIGHTED[kind]
    check_layer(weighted(make), inputs(shape), *RULES[rule])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", AVERAGES)
def test_rule_on_average(kind: str, rule: str) -> None:
    make, shape = AVERAGES[kind]
    check_layer(make(), inputs(shape), *RULES[rule])


@pytest.mark.parametrize("rule", ["zplus", "epsilon", "gamma", "wplus", "flat"])
@pytest.mark.parametrize("kind", [*WEIGHTED, *AVERAGES])
def test_rule_in_the_middle_of_a_net(kind: str, rule: str) -> None:
    """Not the first layer, so its input is non-negative and the layer below gets what it hands on."""
    make, shape = {**WEIGHTED, **AVERAGES}[kind]
    x, layer = inputs(shape), weighted(make)
    convs = {1: nn.Linear, 2: nn.Conv1d, 3: nn.Conv2d, 4: nn.Conv3d}
    size = shape[-1] if kind.startswith("linear") else shape[0]
    first = nn.Linear(size, size) if kind.startswith("linear") else convs[len(shape)](size, size, 1)
    first = weighted(lambda: first, seed=1)
    treatment, brute = RULES[rule]
    overrides = {"first": rules.zplus(), "under*": treatment}
    e = explain(net({"first": first, "relu": nn.ReLU(), "under": layer}, x), x, overrides, ["first", "under", "head"])
    with torch.no_grad():
        a = first(x).relu()
        out = layer(a)
    below = ref.brute_force(brute, layer, a, e.relevance_at("head").reshape(out.shape))
    assert_same(e.relevance_at("under"), below)
    assert_same(e.relevance_at("first"), ref.brute_force(ref.zplus, first, x, below))
    assert_same(e.relevance, e.relevance_at("first"))


@pytest.mark.parametrize("rule", sorted(CONSERVING))
@pytest.mark.parametrize("kind", [*WEIGHTED, *AVERAGES])
def test_conserving_rules_conserve(kind: str, rule: str) -> None:
    make, shape = {**WEIGHTED, **AVERAGES}[kind]
    x = inputs(shape)
    e = explain(net({"under": weighted(make)}, x), x, {"under*": RULES[rule][0]}, [])
    torch.testing.assert_close(e.relevance.flatten(1).sum(1), torch.tensor(START).double(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
def test_units_that_see_only_padding(rule: str) -> None:
    """The corners read nothing, so their relevance has nowhere to go; everybody else's is untouched."""
    layer, x = weighted(lambda: nn.Conv2d(2, 3, 2, padding=2)), inputs((2, 3, 3))
    assert not ref.as_matrix(layer, (2, 3, 3)).connected.any(1).all()
    check_layer(layer, x, *RULES[rule])


def test_box_bounds_per_channel_and_widened() -> None:
    layer, x = weighted(lambda: nn.Conv2d(2, 4, 3, padding=1)), inputs((2, 4, 4))
    low, high = torch.tensor([-4.0, -5.0]).double(), torch.tensor([4.0, 6.0]).double()
    per_input = [bound[:, None, None].expand(2, 4, 4).flatten() for bound in (low, high)]
    check_layer(layer, x, rules.zbox((-4.0, -5.0), (4.0, 6.0)), ref.zbox(*per_input))

    def widened(m: ref.Matrix, a: Tensor, r: Tensor) -> Tensor:
        return ref.zbox(a.clamp(max=-0.5), a.clamp(min=0.5))(m, a, r)

    assert x.min() < -0.5
    assert x.max() > 0.5
    check_layer(layer, x, rules.zbox(-0.5, 0.5), widened)


@pytest.mark.parametrize("treatment", POOLED)
@pytest.mark.parametrize("kind", MAX_POOLS)
@pytest.mark.parametrize("values", ["signed", "ties", "negative"])
def test_max_pool(kind: str, treatment: str, values: str) -> None:
    make, shape = MAX_POOLS[kind]
    x = inputs(shape)
    x = {"signed": x, "ties": x.round().clamp(-1, 1), "negative": -1 - x.abs().round()}[values]
    check_layer(make(), x, treatment, POOLED[treatment])


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1)])
def test_released_max_pool(pool: nn.Module) -> None:
    x = inputs((2, 6, 8)).clamp(min=0)
    check_layer(pool, x, "average-2x2", ref.zplus_stabilised(1e-5, bias=False), nn.AvgPool2d(2))


@pytest.mark.parametrize("rule", ["zplus", "epsilon", "gamma", "w2"])
def test_batch_norm_passed_or_folded(rule: str) -> None:
    conv, x = weighted(lambda: nn.Conv2d(2, 4, 3, padding=1)), inputs((2, 4, 4))
    norm = nn.BatchNorm2d(4).double().eval()
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            tensor.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight[0] *= -norm.weight[0].sign()
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        folded = nn.Conv2d(2, 4, 3, padding=1).double()
        folded.weight.copy_(conv.weight * scale[:, None, None, None])
        folded.bias.copy_((conv.bias - norm.running_mean) * scale + norm.bias)
    treatment, brute = RULES[rule]
    model = net({"conv": conv, "norm": norm, "relu": nn.ReLU()}, x)
    for way, layer in (("pass", conv), ("fold", folded)):
        e = explain(model, x, {nn.BatchNorm2d: way, "conv": treatment}, ["conv", "head"])
        r = e.relevance_at("head").reshape(4, 4, 4, 4)
        assert_same(e.relevance_at("conv"), ref.brute_force(brute, layer, x, r))


class Sum(nn.Module):
    """Two projections that meet in a sum; the relevance of each summand can be read at the end of its branch."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.skip = (weighted(lambda: nn.Linear(5, 4, bias=False), seed) for seed in (1, 2))
        self.main_end, self.skip_end = nn.Identity(), nn.Identity()
        self.head = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.main_end(self.main(x)) + self.skip_end(self.skip(x)))


def uneven(branches: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.full_like(branch, share) for branch, share in zip(branches, (0.75, 0.25), strict=True))


def ratio(main: Tensor, skip: Tensor) -> Tensor:
    share = main.abs() / (main.abs() + skip.abs())
    return torch.where(share.isnan(), torch.full_like(share, 0.5), share)


SPLITS: dict[str, tuple[Any, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "symmetric": ("symmetric", lambda m, s: (torch.full_like(m, 0.5), torch.full_like(s, 0.5))),
    "ratio": ("ratio", lambda m, s: (ratio(m, s), 1 - ratio(m, s))),
    "signed": ("signed", lambda m, s: (m / ref.stabilise(m + s, 1e-6), s / ref.stabilise(m + s, 1e-6))),
    "callable": (uneven, lambda m, s: (torch.full_like(m, 0.75), torch.full_like(s, 0.25))),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str) -> None:
    """The inputs' third sample is all zero, and both branches have an output without weights: 0/0 halves."""
    split, shares = SPLITS[name]
    model, x = Sum().eval(), inputs((5,))
    start = torch.tensor(START, dtype=x.dtype)
    layers = ["main_end", "skip_end", "head"]
    options = {"preset": "epsilon", "split": split, "overrides": {"head": rules.w2()}, "start": start}
    e = relprop.explain(model, x, 1, layers=layers, **options)
    with torch.no_grad():
        both = shares(model.main(x), model.skip(x))
    for end, share in zip(layers, both, strict=False):
        assert_same(e.relevance_at(end), e.relevance_at("head") * share)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    dims = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 2))
    per_axis = [
        draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2), st.integers(1, 4)))
        for _ in range(dims)
    ]
    kernel, stride, padding, dilation, size = (tuple(axis) for axis in zip(*per_axis, strict=True))
    assume(all(s + 2 * p >= d * (k - 1) + 1 for k, p, d, s in zip(kernel, padding, dilation, size, strict=True)))
    channels, outputs = (groups * draw(st.integers(1, 2)) for _ in range(2))
    make = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    layer = make(channels, outputs, kernel, stride, padding, dilation, groups, bias=draw(st.booleans())).double()
    torch.manual_seed(draw(st.integers(0, 1000)))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
            parameter[torch.rand_like(parameter) < 0.3] = 0
    return layer, (channels, *size)


@st.composite
def max_pools(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    kernel, stride, dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)))
    padding, ceil = draw(st.integers(0, kernel // 2)), draw(st.booleans())
    size = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    assume(all(s + 2 * padding >= dilation * (kernel - 1) + 1 for s in size))
    return nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil), (2, *size)


@settings(max_examples=60, deadline=None)
@given(convolutions(), st.sampled_from(sorted(RULES)), st.integers(0, 1000))
def test_any_convolution(drawn: tuple[nn.Module, tuple[int, ...]], rule: str, seed: int) -> None:
    layer, shape = drawn
    check_layer(layer, inputs(shape, seed), *RULES[rule])


@settings(max_examples=40, deadline=None)
@given(max_pools(), st.sampled_from(sorted(POOLED)), st.integers(0, 1000), st.booleans())
def test_any_max_pool(drawn: tuple[nn.Module, tuple[int, ...]], treatment: str, seed: int, ties: bool) -> None:
    layer, shape = drawn
    x = inputs(shape, seed)
    assume(torch.isfinite(layer(x)).all())  # a dilated window can lie in the padding altogether
    check_layer(layer, x.round().clamp(-1, 1) if ties else x, treatment, POOLED[treatment])
