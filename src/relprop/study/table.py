"""Tables: what a study's rows say, with how sure that is."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relprop.errors import RelpropError
from relprop.study.journal import Row

RESAMPLES = 10_000
ASIDE = ("spread", "score of the true class", "score of the explained class")
"""Numbers that a table shows when they are asked for."""
Cell = tuple[str, str]
"""A column: the protocol (or the metric, where it has none) and the number's name."""


@dataclass(frozen=True)
class Estimate:
    """A mean over images.

    Attributes:
        mean: The mean.
        low: Lower end of its 95 % interval.
        high: Upper end.
        n: Number of images.
    """

    mean: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean and 95 % bootstrap interval (percentiles of resampled means; Efron and Tibshirani, 1993)."""
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.percentile(data[draws].mean(1), [2.5, 97.5])
    return Estimate(float(data.mean()), float(low), float(high), len(data))


@dataclass(frozen=True)
class Table:
    """Means by method and column, and differences to a reference method on the same images.

    Attributes:
        columns: What was measured.
        methods: Who was measured.
        cells: Method and column to the mean.
        differences: Method and column to the mean paired difference to the reference.
        reference: The method that the others are compared with, or None.
    """

    columns: tuple[Cell, ...]
    methods: tuple[str, ...]
    cells: dict[tuple[str, Cell], Estimate]
    differences: dict[tuple[str, Cell], Estimate]
    reference: str | None

    def to(self, form: str) -> str:
        """The table as text.

        Args:
            form: ``markdown``, ``latex`` or ``csv``.

        Raises:
            RelpropError: If there is no such form.
        """
        if form not in _FORMS:
            msg = f"There is no table format {form!r}; there are {', '.join(_FORMS)}."
            raise RelpropError(msg)
        return _FORMS[form](self)

    def __str__(self) -> str:
        return self.to("markdown")

    def lines(self) -> list[list[str]]:
        """Header and rows, each cell a mean with its interval, and the paired difference where there is a reference."""
        several = self.reference is not None
        head = ["method", *[f"{name} ({where})" for where, name in self.columns], "n"]
        if several:
            head[-1:-1] = [f"{name} ({where}) - {self.reference}" for where, name in self.columns]
        body = []
        for method in self.methods:
            row = [method, *[_shown(self.cells.get((method, c))) for c in self.columns]]
            if several:
                row += [_shown(self.differences.get((method, c))) for c in self.columns]
            counts = {self.cells[method, c].n for c in self.columns if (method, c) in self.cells}
            body.append([*row, "/".join(map(str, sorted(counts)))])
        return [head, *body]


def tabulate(rows: Iterable[Row], reference: str | None = None, columns: Sequence[str] | None = None) -> Table:
    """Puts rows together.

    Args:
        rows: The rows of a study.
        reference: A method whose scores are subtracted from the others', image by image.
        columns: Names of the numbers to show; None for all but those that are there for the curious.

    Raises:
        RelpropError: If there is nothing to show, or no such reference.
    """
    scores: dict[tuple[str, Cell], dict[str, float]] = {}
    for row in rows:
        for name, value in row.values.items():
            if name in columns if columns is not None else name not in ASIDE:
                scores.setdefault((row.method, (row.protocol or row.metric, name)), {})[row.image] = value
    if not scores:
        msg = "There are no rows to make a table of; run relprop evaluate first."
        raise RelpropError(msg)
    methods = tuple(dict.fromkeys(method for method, _ in scores))
    if reference is not None and reference not in methods:
        msg = f"The reference {reference!r} was not measured; there are {', '.join(methods)}."
        raise RelpropError(msg)
    differences = {}
    for (method, cell), mine in scores.items():
        theirs = scores.get((reference or "", cell), {})
        shared = sorted(mine.keys() & theirs.keys())
        if shared and method != reference:
            differences[method, cell] = estimate([mine[i] - theirs[i] for i in shared])
    cells = {k: estimate([v[i] for i in sorted(v)]) for k, v in scores.items()}
    return Table(tuple(dict.fromkeys(cell for _, cell in scores)), methods, cells, differences, reference)


def _shown(value: Estimate | None) -> str:
    return "" if value is None else f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _markdown(table: Table) -> str:
    head, *body = table.lines()
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def _latex(table: Table) -> str:
    head, *body = (["\\%".join(c.split("%")).replace("_", "\\_") for c in line] for line in table.lines())
    lines = [" & ".join(line) + " \\\\" for line in (head, *body)]
    lines[1:1] = ["\\midrule"]
    return "\n".join(
        ["\\begin{tabular}{l" + "r" * (len(head) - 1) + "}", "\\toprule", *lines, "\\bottomrule", "\\end{tabular}"]
    )


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    interval = ["mean", "low", "high"]
    writer.writerow(["method", "protocol", "score", *interval, "n", "against", *(f"{x} difference" for x in interval)])
    for method in table.methods:
        for cell in table.columns:
            if (method, cell) not in table.cells:
                continue
            e, d = table.cells[method, cell], table.differences.get((method, cell))
            more = [table.reference, d.mean, d.low, d.high] if d else ["", "", "", ""]
            writer.writerow([method, *cell, e.mean, e.low, e.high, e.n, *more])
    return text.getvalue().rstrip("\n")


_FORMS: dict[str, Callable[[Table], str]] = {"markdown": _markdown, "latex": _latex, "csv": _csv}
