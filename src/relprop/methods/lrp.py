"""relprop's own methods: its presets, and the paper's ablations (i) to (iv)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from relprop.engine import explain
from relprop.methods.method import Method
from relprop.presets import PRESETS

_OTSUKI = "Otsuki et al., 2024, Layer-Wise Relevance Propagation with Conservation Property for ResNet, ECCV"
_BACH = "Bach et al., 2015, On Pixel-Wise Explanations for Non-Linear Classifier Decisions by LRP, PLOS ONE 10(7)"
_MONTAVON = "Montavon et al., 2019, Layer-Wise Relevance Propagation: An Overview; as in zennit, Anders et al., 2021"

_LAWS = {
    "relprop": "sums to the probability, exactly",
    "paper": "sums to the probability, exactly",
    "released": "sums to the probability but for what 1e-5 in each denominator and dead pooling windows take",
    "mixture": "sums to the probability but for what epsilon and biases of the upper half take",
    "released-mixture": "none: denominators cancel",
    "epsilon": "sums to the probability but for what epsilon, biases and cancelling sums take",
    "epsilon-plus-flat": "sums to the probability but for what epsilon and biases take",
    "epsilon-gamma-box": "sums to the probability but for what epsilon and biases take",
}
_CITATIONS = {
    "relprop": "docs/preset.md; after " + _OTSUKI,
    "epsilon": _BACH,
    "epsilon-plus-flat": _MONTAVON,
    "epsilon-gamma-box": _MONTAVON,
}

_ABLATIONS: Mapping[str, tuple[str, bool]] = {
    "i": ("symmetric", False),
    "ii": ("symmetric", True),
    "iii": ("ratio", False),
    "iv": ("ratio", True),
}
"""The split at a merge, and whether identity skips get relevance."""


def _run(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    preset: str = "paper",
    split: Any = None,
    identity_skips: bool = True,
    overrides: Mapping[Any, Any] | None = None,
    start: str | None = None,
) -> Tensor:
    relevance: Tensor = explain(
        model,
        x,
        target,
        preset=preset,
        split=split,
        identity_skips=identity_skips,
        overrides=overrides,
        start=start,
    ).relevance
    return relevance


def _ablation(name: str, preset: str) -> Method:
    split, identity = _ABLATIONS[name.rpartition("-")[2]]
    skips = "identity skips in" if identity else "identity skips out"
    run = partial(_run, preset=preset, split=split, identity_skips=identity)
    return Method(name, "lrp", _LAWS[preset], 3, f"{_OTSUKI}; {split}, {skips}", run)


_VARIANTS: Mapping[str, tuple[Mapping[Any, Any], str]] = {
    "winner": ({nn.MaxPool2d: "winner"}, "max pools: the winner takes all"),
    "2x2": ({nn.MaxPool2d: "average-2x2"}, "max pools: the released code's 2x2 average"),
    "folded": ({nn.BatchNorm2d: "fold"}, "batch norms folded into their convolutions"),
}
"""What the paper leaves open, otherwise settled."""


def _variant(name: str) -> Method:
    overrides, what = _VARIANTS[name]

    def run(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        kinds = {type(module) for module in model.modules()}
        there = {kind: treatment for kind, treatment in overrides.items() if kind in kinds}
        return _run(model, x, target, overrides=there)

    return Method(f"paper-{name}", "lrp", _LAWS["paper"], 3, f"{_OTSUKI}; {what}", run)


METHODS = (
    *(
        Method(name, "lrp", law, 3, _CITATIONS.get(name, _OTSUKI), partial(_run, preset=name))
        for name, law in _LAWS.items()
    ),
    *(_ablation(name, "released") for name in _ABLATIONS),
    *(_ablation(f"paper-{name}", "paper") for name in _ABLATIONS),
    *map(_variant, _VARIANTS),
)
assert {method.name for method in METHODS} >= PRESETS.keys()
