"""Conservation: what the relevance sums to at the input, at the first and at the last block, against p(y_c)."""

# ruff: noqa: PLC0415 - matplotlib is imported where it paints

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from relprop import datasets, engine, methods, requests
from relprop.datasets import Dataset
from relprop.errors import RelpropError
from relprop.reproduction.tables import markdown

SAMPLES = 100
PRESETS = {
    "paper": "`paper`: the formulas, exactly",
    "released": "`released`: 1e-5 in denominators, 2x2 pool",
    "released-mixture": "`released-mixture`: epsilon in the upper half, as released",
    "mixture": "`mixture`: the same, stabilised",
    "epsilon": "`epsilon`: conventional LRP, sums split by sign",
}
CONVENTIONAL = "captum-lrp"
PLACES = ("input", "first", "last")
FIELDS = ("image", "method", "probability", *PLACES)

Sums = Mapping[str, Any]
"""One image under one method: its probability and the sum at each place; None where it is not known."""


def sums(model: Any, data: Dataset, batch_size: int = 8) -> Iterator[Sums]:
    """Explains the predicted class of each image by every preset, and by captum's LRP on the network as it is.

    captum starts from the logit; its sums are scaled to a start of p(y_c). They are known at the input only.
    """
    blocks = _blocks(requests.module(model))
    for batch in datasets.batches(data, model.prepare, batch_size):
        names = [sample.name for sample in batch.samples]
        for preset in PRESETS:
            e = engine.explain(model, batch.x, preset=preset, layers=blocks)
            places = (e.relevance, *(e.relevance_at(block) for block in blocks))
            yield from _rows(names, preset, e.start, [_total(place) for place in places])
        logits = e.output.gather(1, e.target[:, None])[:, 0].double()
        total = _total(methods.get(CONVENTIONAL)(model, batch.x, e.target)) / logits * e.start.double()
        yield from _rows(names, CONVENTIONAL, e.start, [total])


def _rows(names: Sequence[str], method: str, start: Tensor, places: Sequence[Tensor]) -> Iterator[Sums]:
    for i, name in enumerate(names):
        known = dict(zip(PLACES, (float(total[i]) for total in places), strict=False))
        yield {"image": name, "method": method, "probability": float(start[i]), **known}


def _blocks(module: torch.nn.Module) -> list[str]:
    """The first and the last residual block of a ResNet as torchvision has it."""
    stages = [name for name, _ in module.named_children() if name.startswith("layer")]
    if not stages:
        raise RelpropError("Conservation is looked at in a ResNet, with stages layer1, layer2 and so on.")
    last = sum(1 for _ in module.get_submodule(stages[-1]).children()) - 1
    return [f"{stages[0]}.0", f"{stages[-1]}.{last}"]


def _total(relevance: Tensor) -> Tensor:
    return relevance.double().flatten(1).sum(1)


def write(rows: Sequence[Sums], path: Path) -> None:
    """Writes the sums as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[Sums]:
    """Reads what :func:`write` has written."""
    with path.open(newline="") as file:
        return [
            {k: v if k in ("image", "method") else float(v) for k, v in row.items() if v}
            for row in csv.DictReader(file)
        ]


def table(rows: Sequence[Sums]) -> str:
    """The deviation |sum - p| / p of each method at each place: the median over images and the largest."""
    head = ["", *(f"{place}: {what}" for place in PLACES for what in ("median", "largest")), "n"]
    body = []
    for method, label in {**PRESETS, CONVENTIONAL: "captum's LRP, epsilon, on the network as it is"}.items():
        mine = [row for row in rows if row["method"] == method]
        cells = []
        for place in PLACES:
            off = [abs(row[place] - row["probability"]) / row["probability"] for row in mine if place in row]
            cells += [f"{median(off):.1e}", f"{max(off):.1e}"] if off else ["", ""]
        body.append([label, *cells, str(len(mine))])
    return markdown([head, *body])


def plot(rows: Sequence[Sums], path: Path) -> None:
    """Scatter plots as in the paper: the sum on one axis, p(y_c) on the other."""
    from matplotlib.figure import Figure

    shown = ("paper", "released", CONVENTIONAL, "released-mixture")
    figure = Figure(figsize=(9, 11), layout="constrained")
    for (method, place), axes in zip(
        [(method, place) for method in shown for place in PLACES], figure.subplots(len(shown), 3).flat, strict=True
    ):
        points = [(row[place], row["probability"]) for row in rows if row["method"] == method and place in row]
        axes.set_title(f"{method}, {'the input' if place == 'input' else f'the {place} block'}", fontsize=9)
        axes.set_ylabel("p(y_c)")
        if not points:
            axes.text(0.5, 0.5, "known at the input only", ha="center", va="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
            continue
        largest = max(abs(x) for x, _ in points)
        if largest > 100:
            power = 10.0 ** int(math.log10(largest))
            axes.set_xscale("symlog")
            axes.set_xticks([-power, 0, power])
        axes.plot([0, 1], [0, 1], color="#c9c9c9", linewidth=1, zorder=0)
        axes.scatter(*zip(*points, strict=True), s=12, color="#2f6db3")
        axes.set_xlabel("sum of relevance")
    figure.savefig(path, dpi=100)
