"""The rules and presets that zennit has too, layer by layer on VGG-16, and the explicit matrix against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import reference as ref
import torch
from torch import Tensor, nn

import relprop
from relprop import rules
from relprop.compat import import_torchvision

torchvision = import_torchvision()

import zennit.composites as zc  # noqa: E402  (zennit imports torchvision, which has to be made to work first)
import zennit.rules as zr  # noqa: E402
from zennit import types as zt  # noqa: E402
from zennit.core import Composite, Hook  # noqa: E402

TOLERANCE = 1e-10
MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64)[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64)[:, None, None]
LOW, HIGH = -MEAN / STD, (1 - MEAN) / STD


@dataclass(frozen=True)
class Case:
    """A network, its input, and the names of its convolutions and linear layers."""

    model: nn.Module
    x: Tensor
    target: Tensor
    layers: list[str]


@pytest.fixture(scope="module")
def vgg() -> Case:
    """torchvision's VGG-16 with random weights and biases, the two hidden layers of its classifier narrowed."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = torchvision.models.vgg16(num_classes=10, init_weights=False)
        model.classifier[0] = nn.Linear(512 * 7 * 7, 48)
        model.classifier[3] = nn.Linear(48, 32)
        model.classifier[6] = nn.Linear(32, 10)
    model = model.to_empty(device="cpu").double().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.normal_(module.bias, std=0.1)
    x = (torch.rand(2, 3, 64, 64, dtype=torch.float64) - MEAN) / STD
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    return Case(model, x, torch.tensor([3, 7]), layers)


class EvenMax(Hook):
    """2x2 max pools that share evenly among tied maxima; zennit itself gives the first of them everything."""

    def forward(self, _: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self.stored_tensors["input"], self.stored_tensors["output"] = args[0], output

    def backward(self, _: nn.Module, __: Any, grad_output: tuple[Tensor]) -> tuple[Tensor]:
        def spread(t: Tensor) -> Tensor:
            return t.repeat_interleave(2, 2).repeat_interleave(2, 3)

        winners = (self.stored_tensors["input"] == spread(self.stored_tensors["output"])).double()
        count = nn.functional.avg_pool2d(winners, 2, divisor_override=1)
        return (winners * spread(grad_output[0] / count),)

    def copy(self) -> EvenMax:
        return EvenMax()


def zennit_relevance(case: Case, composite: Composite) -> dict[str, Tensor]:
    """Relevance at the input of every layer, from a start of one."""
    seen: dict[str, Tensor] = {}
    handles = [
        case.model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0]})
        )
        for name in case.layers
    ]
    try:
        with composite.context(case.model) as model:
            output = model(case.x.clone().requires_grad_())
            start = torch.zeros_like(output).scatter(1, case.target[:, None], 1.0)
            relevance = torch.autograd.grad(output, [seen[name] for name in case.layers], start)
    finally:
        for handle in handles:
            handle.remove()
    return dict(zip(case.layers, relevance, strict=True))


def everywhere(rule: Hook, first: Hook | None = None) -> Composite:
    """One rule on all convolutions and linear layers, zennit's own choice for the rest."""
    layer_map = [(zt.Linear, rule), (zt.MaxPool, EvenMax()), *zc.layer_map_base(1e-6)]
    return zc.SpecialFirstLayerMapComposite(layer_map, [(zt.Linear, first or rule)])


def assert_layers_agree(case: Case, e: relprop.Explanation, want: dict[str, Tensor]) -> None:
    for name in reversed(case.layers):
        difference = (e.relevance_at(name) - want[name]).abs().max()
        assert difference <= TOLERANCE * want[name].abs().max(), name
    assert torch.equal(e.relevance, e.relevance_at(case.layers[0]))


def explain(case: Case, **options: Any) -> relprop.Explanation:
    return relprop.explain(case.model, case.x, target=case.target, start="one", layers=case.layers, **options)


# ours, zennit's; zennit's stabiliser is zero where our rule is exact and no denominator can vanish
PAIRS: dict[str, tuple[Any, Callable[[], Hook]]] = {
    "epsilon": (rules.epsilon(1e-6), lambda: zr.Epsilon(1e-6)),
    "epsilon-large": (rules.epsilon(0.1), lambda: zr.Epsilon(0.1)),
    "zplus": (rules.zplus(epsilon=1e-6), lambda: zr.ZPlus(1e-6, zero_params="bias")),
    "zplus-bias": (rules.zplus(epsilon=1e-6, bias=True), lambda: zr.ZPlus(1e-6)),
    "gamma": (rules.gamma(0.25, epsilon=1e-6), lambda: zr.Gamma(0.25, 1e-6)),
    "alpha-beta": (rules.alpha_beta(2, 1, epsilon=1e-6, bias=True), lambda: zr.AlphaBeta(2, 1, 1e-6)),
    "flat": (rules.flat(), lambda: zr.Flat(0.0)),
    "w2": (rules.w2(), lambda: zr.WSquare(0.0, zero_params="bias")),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_rule_everywhere_on_vgg(vgg: Case, pair: str) -> None:
    ours, theirs = PAIRS[pair]
    overrides = {nn.Conv2d: ours, nn.Linear: ours, nn.AdaptiveAvgPool2d: rules.epsilon(1e-6), nn.MaxPool2d: "winner"}
    e = explain(vgg, preset="epsilon", overrides=overrides)
    assert_layers_agree(vgg, e, zennit_relevance(vgg, everywhere(theirs())))


def test_box_rule_on_vgg(vgg: Case) -> None:
    box = rules.zbox(tuple(LOW.flatten().tolist()), tuple(HIGH.flatten().tolist()))
    e = explain(vgg, preset="epsilon", overrides={"features.0": box, nn.AdaptiveAvgPool2d: rules.epsilon(1e-6)})
    want = zennit_relevance(vgg, everywhere(zr.Epsilon(1e-6), first=zr.ZBox(LOW[None], HIGH[None], stabilizer=0.0)))
    assert_layers_agree(vgg, e, want)


def test_epsilon_plus_flat(vgg: Case) -> None:
    e = explain(vgg, preset="epsilon-plus-flat")
    assert_layers_agree(vgg, e, zennit_relevance(vgg, zc.EpsilonPlusFlat()))


def test_epsilon_gamma_box(vgg: Case) -> None:
    e = explain(vgg, preset="epsilon-gamma-box")
    assert_layers_agree(vgg, e, zennit_relevance(vgg, zc.EpsilonGammaBox(LOW[None], HIGH[None])))


BRUTE: dict[str, tuple[ref.Rule, Callable[[], Hook]]] = {
    "epsilon": (ref.epsilon(1e-6), lambda: zr.Epsilon(1e-6)),
    "zplus": (ref.zplus_stabilised(1e-6, bias=False), lambda: zr.ZPlus(1e-6, zero_params="bias")),
    "zplus-bias": (ref.zplus_stabilised(1e-6, bias=True), lambda: zr.ZPlus(1e-6)),
    "zplus-exact": (ref.zplus, lambda: zr.ZPlus(0.0, zero_params="bias")),
    "gamma": (ref.gamma(0.25, 1e-6), lambda: zr.Gamma(0.25, 1e-6)),
    "alpha-beta": (ref.alpha_beta_stabilised(2, 1, 1e-6, bias=True), lambda: zr.AlphaBeta(2, 1, 1e-6)),
    "alpha-beta-exact": (ref.alpha_beta(2, 1), lambda: zr.AlphaBeta(2, 1, 0.0, zero_params="bias")),
    "flat": (ref.flat, lambda: zr.Flat(0.0)),
    "w2": (ref.w2, lambda: zr.WSquare(0.0, zero_params="bias")),
    "zbox": (ref.zbox(torch.tensor(-5.0), torch.tensor(6.0)), lambda: zr.ZBox(-5.0, 6.0, 0.0)),
}
SINGLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 5, 6)),
    "grouped": (lambda: nn.Conv1d(12, 4, 3, padding=2, dilation=2, groups=2), (12, 7)),
    "linear": (lambda: nn.Linear(9, 5), (9,)),
}


@pytest.mark.parametrize("rule", BRUTE)
@pytest.mark.parametrize("kind", SINGLE)
def test_the_explicit_matrix_agrees_with_zennit(kind: str, rule: str) -> None:
    """The reference itself: signed inputs and relevance, no dead units."""
    torch.manual_seed(0)
    make, shape = SINGLE[kind]
    layer = make().double()
    brute, theirs = BRUTE[rule]
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    handles = theirs().register(layer)
    try:
        out = layer(x)
        r = torch.randn_like(out)
        (want,) = torch.autograd.grad(out, x, r)
    finally:
        handles.remove()
    got = ref.brute_force(brute, layer, x.detach(), r)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
