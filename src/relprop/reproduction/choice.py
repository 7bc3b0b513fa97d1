"""The choice of our own preset: what was screened, on which images, and how it did on others."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from relprop.errors import RelpropError
from relprop.reproduction.page import written
from relprop.reproduction.tables import TIE_SAFE, markdown
from relprop.study import estimate, read
from relprop.study.measures import NAMES
from relprop.study.table import Estimate
from relprop.study.table import scores as tabled

__all__ = ["SEARCH", "held_out", "refresh", "screened"]

SEARCH = "search.csv"
OURS = "relprop"
_SCREENED_RIVAL = "Grad-CAM"
_INSERTION = ("insertion", "deletion", "score")

Column = Mapping[str, float]
"""A number of each image."""


def refresh(text: str, folder: Path) -> str:
    """A page with its blocks written anew: the search, and each study of other images by its folder's name."""
    blocks: dict[str, Callable[[], str]] = {"search": lambda: screened(folder / SEARCH)}
    studies = sorted(path.parent for path in folder.glob("*/rows.parquet"))
    return written(text, {**blocks, **{study.name: partial(held_out, study) for study in studies}})


def screened(path: Path) -> str:
    """Every variant that was screened: ID on each network, less Grad-CAM's on the same images; the best first by that.

    Those that only the second network was given come last.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            scores = found.setdefault((row["variant"], row["network"]), {})
            scores[row["image"]] = float(row["insertion"]) - float(row["deletion"])
    networks = sorted({network for _, network in found}, reverse=True)
    body = []
    for variant in {variant for variant, _ in found}:
        cells, rank = [variant], list[float]()
        for network in networks:
            mine, theirs = found.get((variant, network), {}), found[_SCREENED_RIVAL, network]
            mean = sum(mine.values()) / len(mine) if mine else 0.0
            less = estimate(_paired(mine, theirs)) if mine and variant != _SCREENED_RIVAL else None
            rank.append(less.mean if less else 0.0 if mine else -1.0)
            cells += [f"{mean:.3f}" if mine else "", _signed(less), str(len(mine) or "")]
        body.append((rank, cells))
    head = ["", *(text for network in networks for text in (f"{network}: ID", f"less {_SCREENED_RIVAL}'s", "n"))]
    return markdown([head, *(cells for _, cells in sorted(body, reverse=True))])


def held_out(folder: Path) -> str:
    """Each method's numbers, and by how much ours differs, image by image.

    Intervals of differences are simultaneous: 95 % for all methods in a column, by Bonferroni's correction.
    """
    found = tabled(row for row in read(folder) if row.protocol in ("", TIE_SAFE))
    columns = {(method, name): column for (method, (_, name)), column in found.items()}
    methods = list(dict.fromkeys(method for method, _ in columns))
    if OURS not in methods:
        raise RelpropError(f"The study in {folder} has no rows of {OURS}.")
    rivals = [method for method in methods if method != OURS]
    level = 1 - 0.05 / max(1, len(rivals))

    def less(method: str, name: str) -> Estimate | None:
        pairs = _paired(columns.get((OURS, name), {}), columns.get((method, name), {}))
        return estimate(pairs, level=level) if pairs and method != OURS else None

    scores = [["", "Ins", "Del", "ID", "ID of ours less its own", "n"]]
    measured = [name for name in NAMES if any((method, name) in columns for method in methods)]
    # Of what is tiny, three decimals would say nothing.
    forms = {n: ".1e" if 0 < abs(_mean(columns.get((OURS, n), {}))) < 0.0015 else ".3f" for n in measured}
    others = [["", *(text for name in measured for text in (name, "ours less its own")), "n"]]
    for method in [OURS, *sorted(rivals, key=lambda m: -_mean(columns.get((m, "score"), {})))]:
        if (method, "score") in columns:
            means = [f"{_mean(columns[method, name]):.3f}" for name in _INSERTION]
            scores.append([f"`{method}`", *means, _signed(less(method, "score")), str(len(columns[method, "score"]))])
        there = {name: columns[method, name] for name in measured if (method, name) in columns}
        cells = (
            (format(_mean(there[n]), form), _signed(less(method, n), form)) if n in there else ("", "")
            for n, form in forms.items()
        )
        counts = sorted({len(column) for column in there.values()})
        if there:
            others.append([f"`{method}`", *(cell for pair in cells for cell in pair), "/".join(map(str, counts))])
    return "\n\n".join(markdown(table) for table, any_of in ((scores, len(scores) > 1), (others, measured)) if any_of)


def _paired(mine: Column, theirs: Column) -> list[float]:
    return [mine[image] - theirs[image] for image in sorted(mine.keys() & theirs.keys())]


def _mean(column: Column) -> float:
    return sum(column.values()) / len(column) if column else 0.0


def _signed(value: Estimate | None, form: str = ".3f") -> str:
    return "" if value is None else f"{value.mean:+{form}} [{value.low:+{form}}, {value.high:+{form}}]"
