"""Variants: our own preset with one part of it changed at a time, measured beside Grad-CAM and the paper's.

    python benchmarks/variants.py imagenet/ --limit 40 --out runs/variants
    python benchmarks/variants.py imagenet/ --model efficientnet_lite0 --weights tensorflow --out runs/variants-lite0

Started again, it continues.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

import relprop
from relprop.merges import SYMMETRIC
from relprop.methods import Method
from relprop.presets import POOLINGS, PRESETS, WINNER
from relprop.rules import alpha_beta, epsilon, flat, gamma, zbox, zplus

CHANGES: dict[str, dict[str, Any]] = {
    "no contrast": {"start": None},
    "z+ in the head": {"head": None},
    "epsilon in the head": {"head": epsilon(1e-6, bias=False)},
    "alpha2beta1 in the head": {"head": alpha_beta(2, 1)},
    "alpha5beta4 in the head": {"head": alpha_beta(5, 4)},
    "neither contrast nor head": {"start": None, "head": None},
    "strides as they are": {"even": False},
    "ratio in both halves": {"lower_split": None},
    "symmetric in both halves": {"split": SYMMETRIC},
    "gamma in the upper half, batch norms folded": {"upper": gamma(0.25)},
    "alpha2beta1 in the upper half": {"upper": alpha_beta(2, 1), "upper_norm": "pass"},
    "epsilon in the upper half, batch norms folded": {"upper": epsilon(0.01, relative=True)},
    "flat first": {"first": flat()},
    "z+ first": {"first": zplus()},
    "zB first": {"first": zbox()},
    "the winner takes the pool": {"pool": WINNER},
    "2x2 for the pool": {"pool": POOLINGS["average-2x2"]},
    "batch norms folded": {"norm": "fold"},
}
"""What each variant has in place of the preset's own."""

RIVALS = ("relprop", "grad-cam", "paper", "ii")


def variant(name: str) -> Method:
    """The preset with a change, as a method."""
    PRESETS[name] = replace(PRESETS["relprop"], **CHANGES[name])
    return Method(name, "lrp", "sums to the probability", 3, "docs/preset.md", partial(_run, preset=name))


def _run(model: nn.Module, x: Tensor, target: Tensor, *, preset: str) -> Tensor:
    relevance: Tensor = relprop.explain(model, x, target, preset=preset).relevance
    return relevance


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder of images")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--points", type=int, default=26)
    parser.add_argument("--metrics", default="insertion-deletion,class-sensitivity")
    parser.add_argument("--only", nargs="*", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--out", default="runs/variants")
    asked = parser.parse_args()
    study = relprop.evaluate(
        relprop.load(asked.model, asked.weights),
        asked.data,
        [*RIVALS, *map(variant, asked.only)],
        asked.metrics.split(","),
        limit=asked.limit,
        points=asked.points,
        seeds=1,
        out=asked.out,
    )
    print(study.table("grad-cam"))
    for what, why in study.failures.items():
        print(f"{what}: {why}")


if __name__ == "__main__":
    main()
