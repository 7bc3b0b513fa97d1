"""Tables: the paper's figures beside ours, as published and where ties cannot help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from relprop.datasets import Dataset
from relprop.methods import Method
from relprop.reproduction.claims import CONTROLS, COSTLY, Claim, Line
from relprop.study import Row, Study, estimate, evaluate

__all__ = ["by_class", "measure", "shown", "tabulate"]

POINTS, SEEDS = 26, 1
"""Points of each curve, of the published 101 every fourth; one random order of tied pixels an image."""

SCORES = ("insertion", "deletion", "score")
PUBLISHED, TIE_SAFE = "otsuki2024", "tie-safe"

Values: TypeAlias = Mapping[tuple[str, str, str], Mapping[str, float]]
"""By method, protocol and name of the score: its value for each image."""


def measure(
    model: Any, data: Dataset, methods: Sequence[Method], out: Path, *, costly: int, **settings: Any
) -> list[Study]:
    """Measures methods under both protocols; those that cost most on the first images only.

    Args:
        model: What ``relprop.load`` returns.
        data: The images.
        methods: The methods.
        out: The folder of the study; what it holds is not measured again.
        costly: How many images a method of 500 forward passes and more gets.
        **settings: As for :func:`relprop.evaluate`.
    """
    settings = {"points": POINTS, "seeds": SEEDS, "protocol": "both", "out": out, **settings}
    dear = [m for m in methods if m.cost >= COSTLY]
    cheap = [m for m in methods if m.cost < COSTLY]
    parts = ((cheap, data), (dear, data.limit(costly)))
    return [evaluate(model, images, some, **settings) for some, images in parts if some]


def values(rows: Iterable[Row]) -> Values:
    """The scores of insertion and deletion among some rows."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric == "insertion-deletion":
            for name, value in row.values.items():
                found.setdefault((row.method, row.protocol, name), {})[row.image] = value
    return found


def tabulate(claim: Claim, rows: Iterable[Row]) -> str:
    """The claim and what was measured, as Markdown; methods without rows have empty cells.

    Intervals are 95 % bootstrap intervals of the mean ID; differences to the reference are paired.
    """
    found = values(rows)
    head = ["", *(f"{where} {name}" for where in ("paper", "published", "tie-safe") for name in ("Ins", "Del", "ID"))]
    if claim.reference:
        head += [f"published ID - {_label(claim)}", f"tie-safe ID - {_label(claim)}"]
    body = []
    for line in (*claim.lines, *(control for control in CONTROLS if control.method not in _methods(claim))):
        cells = [line.label, *(f"{number:.3f}" for number in line.paper or ())]
        cells += [""] * (4 - len(cells))
        for protocol in (PUBLISHED, TIE_SAFE):
            cells += [shown(found.get((line.method, protocol, name), {}), name == "score") for name in SCORES]
        for protocol in (PUBLISHED, TIE_SAFE) if claim.reference else ():
            cells.append(shown(_difference(found, line.method, claim.reference or "", protocol)))
        body.append([*cells, str(len(found.get((line.method, PUBLISHED, "score"), {})))])
    return markdown([[*head, "n"], *body])


def by_class(rows: Iterable[Row], lines: Sequence[Line]) -> str:
    """ID of the true and of the explained class, the predicted one, from the same masks."""
    found = values(rows)
    body = [["", "published, true", "published, explained", "tie-safe, explained", "tie-safe, true", "n"]]
    for line in lines:
        columns = [
            (line.method, protocol, name)
            for protocol, other in ((PUBLISHED, "explained"), (TIE_SAFE, "true"))
            for name in ("score", f"score of the {other} class")
        ]
        cells = [shown(found.get(column, {})) for column in columns]
        body.append([line.label, *cells, str(len(found.get(columns[0], {})))])
    return markdown(body)


def shown(scores: Mapping[str, float], interval: bool = True) -> str:
    """A mean over images, with its interval or without."""
    if not scores:
        return ""
    e = estimate([scores[image] for image in sorted(scores)])
    return f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]" if interval else f"{e.mean:.3f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A header and rows."""
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---", *["---:"] * (len(head) - 1)], *body))


def _difference(found: Values, method: str, reference: str, protocol: str) -> dict[str, float]:
    """Paired differences of ID; none to itself."""
    mine, theirs = (found.get((name, protocol, "score"), {}) for name in (method, reference))
    return {image: mine[image] - theirs[image] for image in mine.keys() & theirs.keys()} if method != reference else {}


def _methods(claim: Claim) -> set[str]:
    return {line.method for line in claim.lines}


def _label(claim: Claim) -> str:
    return next(line.label for line in claim.lines if line.method == claim.reference)
