"""What leaves a network at its input is what entered at its output: on known architectures, and on random nets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import relprop
from relprop import ledger, rules

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SIZES = {
    "resnet18": 64,
    "resnet34": 64,
    "resnet50": 64,
    "resnet101": 64,
    "resnet152": 64,
    "resnext50_32x4d": 64,
    "wide_resnet50_2": 64,
    "vgg16": 32,
    "vgg16_bn": 32,
    "alexnet": 64,
}
KINDS = ("noise", "zeros", "constant", "one lit pixel", "values of 1e4", "values of 1e-20")
EXACT = ("relprop", "paper")
MakeModel = Callable[..., nn.Module]


def sample(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """One input, `(1, *shape)`, of a kind."""
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    if kind == "one lit pixel":
        x = torch.zeros_like(noise)
        x[(0, slice(None), *[n // 2 for n in shape[1:]])] = 1.0
        return x
    return {
        "noise": noise,
        "zeros": torch.zeros_like(noise),
        "constant": torch.full_like(noise, 0.7),
        "values of 1e4": 1e4 * noise,
        "values of 1e-20": 1e-20 * noise,
    }[kind]


def totals(e: relprop.Explanation) -> Tensor:
    """The relevance of each sample's input, summed in float64 and without the ledger's help."""
    return e.relevance.double().flatten(1).sum(1)


def assert_conserves(e: relprop.Explanation, named: tuple[str, ...] = ()) -> None:
    """The ledger is balanced, every node of it is, and so is a sum that knows nothing of the ledger."""
    tolerance = TOLERANCE[e.relevance.dtype]
    assert torch.isfinite(e.relevance).all()
    assert e.ledger.error.max() <= tolerance, e.ledger.error
    assert e.ledger.max_leak <= tolerance
    assert set(e.ledger.absorbed_by_cause) <= set(named)
    accounted = totals(e) + sum(e.ledger.absorbed_by_cause.values(), start=torch.zeros(()))
    off = (accounted - e.start.double()).abs() / e.start.double().abs()
    assert off.max() <= tolerance, off


@pytest.mark.parametrize("preset", EXACT)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_lost(torchvision_model: MakeModel, name: str, dtype: torch.dtype, preset: str) -> None:
    model = torchvision_model(name, seed=3).to(dtype)
    x = torch.cat([sample(kind, (3, SIZES[name], SIZES[name]), dtype) for kind in KINDS])
    e = relprop.explain(model, x, preset=preset, strict=True)
    assert e.start.min() > 0
    assert_conserves(e)


@pytest.mark.parametrize("preset", EXACT)
@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_lost_of_single_samples(torchvision_model: MakeModel, name: str, preset: str) -> None:
    """A batch of one takes other kernels, which sum in another order."""
    model = torchvision_model(name, seed=4)
    for kind in KINDS:
        x = sample(kind, (3, 32, 32) if name != "alexnet" else (3, 64, 64), torch.float32)
        assert_conserves(relprop.explain(model, x, preset=preset))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rule", ["z+", "flat", "w2"])
def test_thousands_of_equal_shares_add_up(rule: str, batch: int) -> None:
    """Equal numbers round alike, so that the errors of a plain sum do not cancel."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 3, bias=False)).eval()
    e = relprop.explain(model, torch.zeros(batch, 784), overrides={"*": rule}, start="one", strict=True)
    assert_conserves(e)


def test_torchvision_models_have_negative_batch_norm_weights(torchvision_model: MakeModel) -> None:
    norms = [m for m in torchvision_model("resnet18", seed=3).modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(norm.weight.min() < 0 and norm.running_mean.abs().max() > 0 for norm in norms)


CONSERVING: dict[str, dict[str, Any]] = {
    "symmetric": {"split": "symmetric"},
    "symmetric, identity skips out": {"split": "symmetric", "identity_skips": False},
    "ratio, identity skips out": {"identity_skips": False},
    "main-only": {"split": "main-only"},
    "own split": {"split": lambda branches: [0.25 for _ in branches[1:]] + [1 - 0.25 * (len(branches) - 1)]},
    "first layer flat": {"overrides": {"conv1": "flat"}},
    "first layer w2": {"overrides": {"conv1": "w2"}},
    "first layer zB": {"overrides": {"conv1": "zB"}},
    "first layer z+": {"overrides": {"conv1": "z+"}},
    "winner takes all": {"overrides": {nn.MaxPool2d: "winner"}},
    "flat everywhere": {"overrides": {"*": "flat"}},
    "w2 everywhere": {"overrides": {"*": "w2"}},
    "a split at one block": {"overrides": {3: "main-only"}},
}


@pytest.fixture(scope="module")
def resnet18(torchvision_model: MakeModel) -> dict[torch.dtype, nn.Module]:
    return {dtype: torchvision_model("resnet18", seed=5).to(dtype) for dtype in TOLERANCE}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", CONSERVING.values(), ids=CONSERVING)
@pytest.mark.parametrize("preset", EXACT)
def test_other_conserving_configurations(
    resnet18: dict[torch.dtype, nn.Module], options: dict[str, Any], dtype: torch.dtype, preset: str
) -> None:
    x = torch.cat([sample(kind, (3, 64, 64), dtype) for kind in KINDS])
    assert_conserves(relprop.explain(resnet18[dtype], x, preset=preset, strict=True, **options))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_exact_alpha2beta1_conserves_at_every_node(resnet18: dict[torch.dtype, nn.Module], dtype: torch.dtype) -> None:
    """It doubles relevance of both signs at each layer, so only the nodes can be asked for rounding errors of one."""
    x = torch.cat([sample(kind, (3, 64, 64), dtype) for kind in KINDS])
    e = relprop.explain(resnet18[dtype], x, preset="paper", overrides={"*": rules.alpha_beta(2, 1)}, strict=True)
    assert e.relevance.min() < 0
    assert e.ledger.max_leak <= TOLERANCE[dtype]
    assert e.ledger.absorbed_by_cause == {}
    if dtype == torch.float64:
        torch.testing.assert_close(totals(e), e.start, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_released_loses_only_what_it_names(resnet18: dict[torch.dtype, nn.Module], dtype: torch.dtype) -> None:
    x = torch.cat([sample(kind, (3, 64, 64), dtype) for kind in KINDS])
    e = relprop.explain(resnet18[dtype], x, preset="released", strict=True)
    assert_conserves(e, named=("epsilon",))
    lost = e.ledger.absorbed_by_cause["epsilon"]
    assert (lost > 1e-6 * e.start).all()


def test_what_epsilon_and_biases_take_is_named(resnet18: dict[torch.dtype, nn.Module]) -> None:
    x = torch.cat([sample(kind, (3, 64, 64), torch.float64) for kind in ("noise", "constant", "one lit pixel")])
    e = relprop.explain(resnet18[torch.float64], x, preset="mixture", strict=True)
    assert e.ledger.max_leak <= 1e-10
    accounted = totals(e) + sum(e.ledger.absorbed_by_cause.values())
    torch.testing.assert_close(accounted, e.start, rtol=1e-8, atol=0)
    assert set(e.ledger.absorbed_by_cause) == {"epsilon", "bias"}


def test_a_bias_of_tokens_is_that_of_their_features_though_there_are_as_many() -> None:
    for tokens in (7, 8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * tokens, 5)).double().eval()
        x = sample("noise", (tokens, 8), torch.float64)
        e = relprop.explain(model, x, preset="epsilon", strict=True)
        assert e.ledger.error.max() < 1e-12


def test_sums_do_not_depend_on_how_relevance_lies_in_memory() -> None:
    r = torch.arange(768.0, dtype=torch.float64).reshape(2, 8, 4, 4, 3).movedim(-1, 0) - 300
    torch.testing.assert_close(ledger.total(r), r.flatten(2).sum(2))
    torch.testing.assert_close(ledger.totals(r), (r.flatten(2).sum(2), r.abs().flatten(2).sum(2)))


class SamplesSecond(nn.Module):
    """A sum that halves, far from where its skip began, with the samples along the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.one, self.two, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).permute(1, 0, 2)
        t = (h + self.one(h)).relu()
        return self.out((h + self.two(t)).permute(1, 0, 2).mean(1))


@pytest.mark.parametrize("preset", ["relprop", "paper"])
def test_halves_are_not_written_over_where_samples_are_second(preset: str) -> None:
    torch.manual_seed(0)
    model, x = SamplesSecond().double().eval(), sample("noise", (5, 4), torch.float64).expand(3, 5, 4).clone()
    x += torch.arange(3.0).reshape(3, 1, 1)
    e = relprop.explain(model, x, 1, preset=preset, split="symmetric", strict=True)
    alone = torch.cat([relprop.explain(model, one[None], 1, preset=preset, split="symmetric").relevance for one in x])
    torch.testing.assert_close(e.relevance, alone)


def test_a_dead_network_hands_relevance_evenly_to_real_inputs_and_none_to_padding() -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1)
    nn.init.zeros_(conv.weight)
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(4, 2)).eval()
    nn.init.zeros_(model[2].weight)
    e = relprop.explain(model, torch.ones(1, 1, 2, 2), target=0, start="one", strict=True)
    torch.testing.assert_close(e.relevance, torch.full((1, 1, 2, 2), 0.25))


def test_an_output_that_sees_only_padding_keeps_its_relevance_under_that_name() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1, padding=1), nn.Flatten(), nn.Linear(16, 2)).eval()
    for p in model.parameters():
        nn.init.ones_(p)
    e = relprop.explain(
        model, torch.ones(1, 1, 2, 2), target=0, preset="paper", start="one", overrides={"0": "z+"}, strict=True
    )
    torch.testing.assert_close(e.ledger.absorbed_by_cause["padding"], torch.tensor([6 / 10], dtype=torch.float64))
    torch.testing.assert_close(e.relevance, torch.full((1, 1, 2, 2), 1 / 10))


def test_a_constant_takes_its_share_by_name() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    e = relprop.explain(Shifted().eval(), torch.tensor([[1.0, 3.0, 0.0]]), target=1, start="one", strict=True)
    torch.testing.assert_close(e.relevance, torch.tensor([[0.0, 0.75, 0.0]]))
    torch.testing.assert_close(e.ledger.absorbed_by_cause["constant"], torch.tensor([0.25], dtype=torch.float64))
    assert e.ledger.error.max() <= 1e-6


# -- nets drawn at random ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """How one residual block is built and written."""

    channels: int
    stride: int
    groups: int
    dilation: int
    bias: bool
    norm: bool
    bottleneck: bool
    preactivation: bool
    projection: str
    sum: str
    relu: str
    dead: str
    pool: str


@dataclass(frozen=True)
class Net:
    """How a net is built."""

    axes: int
    size: int
    blocks: tuple[Block, ...] = field(default=())
    head: str = "adaptive"
    seed: int = 0


BLOCKS = st.builds(
    Block,
    channels=st.sampled_from([4, 8]),
    stride=st.sampled_from([1, 1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    dilation=st.sampled_from([1, 1, 2]),
    bias=st.booleans(),
    norm=st.booleans(),
    bottleneck=st.booleans(),
    preactivation=st.booleans(),
    projection=st.sampled_from(["identity", "identity", "conv", "conv+norm", "pool+conv"]),
    sum=st.sampled_from(["+", "+=", "torch.add", "add", "add_", "three", "sum()", "twice", "minus"]),
    relu=st.sampled_from(["module", "in place", "reused", "F.relu", "F.relu in place", "torch.relu", "relu_"]),
    dead=st.sampled_from(["none", "none", "weights", "bias", "all"]),
    pool=st.sampled_from(
        ["none", "none", "max", "max ceil", "max F", "max dilated", "avg", "avg ceil", "avg F", "adaptive max F"]
    ),
)
NETS = st.builds(
    Net,
    axes=st.sampled_from([1, 2, 2, 3]),
    size=st.sampled_from([5, 7, 8]),
    blocks=st.lists(BLOCKS, min_size=1, max_size=4).map(tuple),
    head=st.sampled_from(["adaptive", "mean", "view", "adaptive max", "permute"]),
    seed=st.integers(0, 2**16),
)


def module(name: str, axes: int) -> Callable[..., Any]:
    """`nn.Conv2d` for `("Conv", 2)`, and so on."""
    found: Callable[..., Any] = getattr(nn, f"{name}{axes}d")
    return found


class Pool(nn.Module):
    """A pool of one of the kinds, written as a module or as a function; none where the input is too small for it."""

    def __init__(self, kind: str, axes: int, size: int) -> None:
        super().__init__()
        self.kind = kind if size >= 3 else "none"
        self.functions = {
            "max F": getattr(F, f"max_pool{axes}d"),
            "avg F": getattr(F, f"avg_pool{axes}d"),
            "adaptive max F": getattr(F, f"adaptive_max_pool{axes}d"),
        }
        modules = {
            "max": lambda: module("MaxPool", axes)(3, 2, 1),
            "max ceil": lambda: module("MaxPool", axes)(3, 2, 1, ceil_mode=True),
            "max dilated": lambda: module("MaxPool", axes)(2, 1, 1, dilation=2),
            "avg": lambda: module("AvgPool", axes)(3, 2, 1, count_include_pad=False),
            "avg ceil": lambda: module("AvgPool", axes)(3, 2, 1, ceil_mode=True),
        }
        self.pool = modules[self.kind]() if self.kind in modules else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "adaptive max F":
            return self.functions[self.kind](x, 2)
        if self.kind in self.functions:
            return self.functions[self.kind](x, 3, stride=2, padding=1)
        return self.pool(x)


class Residual(nn.Module):
    """A residual block as a spec has it."""

    def __init__(self, spec: Block, inputs: int, axes: int, size: int) -> None:
        super().__init__()
        self.spec = spec
        outputs, conv, norm = spec.channels, module("Conv", axes), module("BatchNorm", axes)
        same = inputs == outputs and spec.stride == 1 and spec.projection == "identity"
        settings_ = {"padding": spec.dilation, "dilation": spec.dilation, "bias": spec.bias}
        wide = conv(inputs, outputs, 3, stride=spec.stride, groups=spec.groups, **settings_)
        if spec.bottleneck:
            wide = nn.Sequential(conv(inputs, inputs, 1, bias=spec.bias), nn.ReLU(), wide)
        self.conv1 = wide
        self.norm1 = norm(inputs if spec.preactivation else outputs) if spec.norm else nn.Identity()
        self.conv2 = conv(outputs, outputs, 3, groups=spec.groups, **settings_)
        self.norm2 = norm(outputs) if spec.norm else nn.Identity()
        self.relu = nn.ReLU(inplace=spec.relu in ("in place", "reused"))
        self.relu2 = self.relu if spec.relu == "reused" else nn.ReLU(inplace=spec.relu == "in place")
        project = [conv(inputs, outputs, 1, stride=spec.stride, bias=spec.bias)]
        if spec.projection == "conv+norm":
            project.append(norm(outputs))
        if spec.projection == "pool+conv" and size > 1:
            pool = module("AvgPool", axes)(spec.stride, ceil_mode=True)
            project = [pool, conv(inputs, outputs, 1, bias=spec.bias)]
        self.project = nn.Identity() if same else nn.Sequential(*project)
        self.extra = conv(outputs, outputs, 1, bias=spec.bias) if spec.sum in ("three", "sum()") else None
        self.pool = Pool(spec.pool, axes, -(-size // spec.stride))

    def activate(self, x: Tensor, first: bool) -> Tensor:
        """The rectifier, in one of the ways of writing it."""
        written: dict[str, Callable[[Tensor], Tensor]] = {
            "F.relu": F.relu,
            "F.relu in place": lambda t: F.relu(t, inplace=True),
            "torch.relu": torch.relu,
            "relu_": lambda t: t.relu_(),
        }
        return written.get(self.spec.relu, self.relu if first else self.relu2)(x)

    def add(self, main: Tensor, skip: Tensor) -> Tensor:
        """The sum, in one of the ways of writing it."""
        way = self.spec.sum
        if way == "+=":
            main += skip
            return main
        if way == "three":
            return main + self.extra(main) + skip
        if way == "sum()":
            return sum([main, self.extra(main), skip])
        written: dict[str, Callable[[], Tensor]] = {
            "+": lambda: skip + main,
            "torch.add": lambda: torch.add(main, skip),
            "add": lambda: main.add(skip, alpha=0.5),
            "add_": lambda: main.add_(skip),
            "twice": lambda: (main + main) + skip,
            "minus": lambda: main - skip,
        }
        return written[way]()

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.preactivation:
            h = self.activate(self.norm1(x), first=True)
            main = self.conv2(self.activate(self.norm2(self.conv1(h)), first=False))
            return self.pool(self.add(main, self.project(x)))
        main = self.norm2(self.conv2(self.activate(self.norm1(self.conv1(x)), first=True)))
        return self.pool(self.activate(self.add(main, self.project(x)), first=False))


class Drawn(nn.Module):
    """A net as a spec has it."""

    def __init__(self, spec: Net) -> None:
        super().__init__()
        self.spec = spec
        self.stem = module("Conv", spec.axes)(2, 4, 3, padding=1)
        self.blocks = nn.Sequential()
        h = self.stem(torch.zeros(1, 2, *[spec.size] * spec.axes))
        for block in spec.blocks:
            self.blocks.append(Residual(block, h.shape[1], spec.axes, h.shape[2]).eval())
            h = self.blocks[-1](h)
        out = 1 if spec.head == "mean" else 2**spec.axes
        kind = "AdaptiveMaxPool" if spec.head == "adaptive max" else "AdaptiveAvgPool"
        self.pool = module(kind, spec.axes)(2)
        self.fc = nn.Linear(h.shape[1] * out, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.stem(x))
        if self.spec.head == "mean":
            return self.fc(h.mean(list(range(2, 2 + self.spec.axes))))
        h = self.pool(h)
        if self.spec.head == "permute":
            h = h.movedim(1, -1).contiguous()
        return self.fc(h.view(h.size(0), -1) if self.spec.head == "view" else torch.flatten(h, 1))


def build(spec: Net) -> nn.Module:
    """The net with random weights, batch norms that are not the identity, and dead channels."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(spec.seed)
        net = Drawn(spec).eval()
        for m in net.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 1.5)
                m.weight.normal_()
                m.bias.normal_(std=0.1)
        for block, made in zip(spec.blocks, net.blocks, strict=True):
            last = made.norm2 if isinstance(made.norm2, nn.modules.batchnorm._BatchNorm) else made.conv2
            if block.dead == "weights":
                made.conv2.weight[::2] = 0
            if block.dead == "bias" and last.bias is not None:
                last.bias[1:] = -1e6
            if block.dead == "all":
                for p in made.parameters():
                    p.zero_()
    return net


@settings(max_examples=200)
@given(
    spec=NETS,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64]),
    split=st.sampled_from([None, None, "symmetric", "main-only"]),
    identity_skips=st.sampled_from([True, True, False]),
    preset=st.sampled_from(EXACT),
)
def test_drawn_nets_lose_nothing(
    spec: Net, kinds: list[str], dtype: torch.dtype, split: str | None, identity_skips: bool, preset: str
) -> None:
    model = build(spec).to(dtype)
    shape = (2, *[spec.size] * spec.axes)
    x = torch.cat([sample(kind, shape, dtype, seed) for seed, kind in enumerate(kinds)])
    before = x.clone()
    how = {"preset": preset, "split": split, "identity_skips": identity_skips}
    e = relprop.explain(model, x, start="one", strict=True, **how)
    assert torch.equal(x, before)
    assert_conserves(e)
    with torch.no_grad():
        output = model(x.clone())
    for got, want in zip(e.output, output, strict=True):  # samples of 1e4 do not hide those of 1e-20
        allowed = 10 * TOLERANCE[dtype] * float(want.abs().max())  # biases of -1e6 cost a digit
        torch.testing.assert_close(got, want, rtol=0, atol=allowed + 1e-30)
