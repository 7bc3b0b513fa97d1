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
_AT_ONCE = 4_000_000
ASIDE = ("spread", "score of the true class", "score of the explained class", "similarity when all is random")
"""Numbers that a table shows when they are asked for."""
WIDE = 6
"""Columns of numbers, each with its interval, that can be read side by side."""
PROTOCOLS = ("otsuki2024", "tie-safe")
Cell = tuple[str, str]
"""A column: the protocol (or the metric, where it has none) and the number's name."""


@dataclass(frozen=True)
class Estimate:
    """A mean over images.

    Attributes:
        mean: The mean.
        low: Lower end of its interval.
        high: Upper end.
        n: Number of images.
    """

    mean: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float], seed: int = 0, level: float = 0.95) -> Estimate:
    """Mean and bootstrap interval (percentiles of resampled means; Efron and Tibshirani, 1993)."""
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    draw, step = np.random.default_rng(seed), max(1, _AT_ONCE // len(data))
    sizes = [min(step, RESAMPLES - i) for i in range(0, RESAMPLES, step)]  # all at once would be gigabytes
    means = np.concatenate([data[draw.integers(0, len(data), (size, len(data)))].mean(1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
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

    def blocks(self) -> list[list[list[str]]]:
        """Header and rows, each cell a mean with its interval, and paired differences where there is a reference.

        What is too wide comes in several blocks: metrics of several numbers apart from those of one, and differences
        apart from what they are differences of. A method has a line where it has numbers.
        """
        wide = len(self.columns) * (2 if self.reference else 1) > WIDE
        blocks = []
        for columns in self._groups() if wide else [self.columns]:
            plain = [(cell, False) for cell in columns]
            differing = [(cell, True) for cell in columns if self.reference]
            fits = len(plain + differing) <= WIDE
            blocks += [plain + differing] if fits or not differing else [plain, differing]
        return [self._block(columns) for columns in blocks]

    def _groups(self) -> list[tuple[Cell, ...]]:
        alone = [c for c in self.columns if c[0] == c[1]]
        together = tuple(c for c in self.columns if c[0] != c[1])
        groups = [together] if together else []
        return groups + [tuple(alone[i : i + WIDE]) for i in range(0, len(alone), WIDE)]

    def _block(self, columns: Sequence[tuple[Cell, bool]]) -> list[list[str]]:
        """Header and rows of some columns, each with whether it is of differences."""
        head = [f"{_title(cell)} - {self.reference}" if differs else _title(cell) for cell, differs in columns]
        body = []
        for method in self.methods:
            found = [(self.differences if differs else self.cells).get((method, cell)) for cell, differs in columns]
            counts = sorted({e.n for e in found if e is not None})
            if counts:
                body.append([method, *map(_shown, found), "/".join(map(str, counts))])
        return [["method", *head, "n"], *body]


def tabulate(
    rows: Iterable[Row],
    reference: str | None = None,
    columns: Sequence[str] | None = None,
    *,
    methods: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    protocol: str = "both",
) -> Table:
    """Puts rows together.

    Args:
        rows: The rows of a study.
        reference: A method whose scores are subtracted from the others', image by image.
        columns: Names of the numbers to show; None for all but those that are there for the curious.
        methods: The methods to show, in this order; None for all.
        metrics: The metrics to show; None for all.
        protocol: Of insertion and deletion: ``tie-safe``, ``otsuki2024`` or ``both``.

    Raises:
        RelpropError: If there is nothing to show, something that was asked for is not there, or the rows are of
            several settings, which a mean would mix.
    """
    rows = list(rows)
    _check(methods, {row.method for row in rows}, "method")
    _check(metrics, {row.metric for row in rows}, "metric")
    _check(columns, {name for row in rows for name in row.values}, "number")
    if protocol not in ("both", *PROTOCOLS):
        raise RelpropError(f"There is no protocol {protocol!r}; there are {', '.join(PROTOCOLS)} and both.")
    found = scores(
        row
        for row in rows
        if (metrics is None or row.metric in metrics) and (protocol == "both" or row.protocol in ("", protocol))
    )
    asked = {cell for _, cell in found if (cell[1] in columns if columns is not None else cell[1] not in ASIDE)}
    found = {(method, cell): values for (method, cell), values in found.items() if cell in asked}
    if not found:
        msg = "There are no rows to make a table of; run relprop evaluate first."
        raise RelpropError(msg)
    measured = tuple(sorted({method for method, _ in found}))
    if reference is not None and reference not in measured:
        msg = f"The reference {reference!r} was not measured; there are {', '.join(measured)}."
        raise RelpropError(msg)
    shown = measured if methods is None else tuple(name for name in dict.fromkeys(methods) if name in measured)
    cells, differences = {}, {}
    for (method, cell), mine in found.items():
        if method not in shown:
            continue
        cells[method, cell] = estimate([mine[i] for i in sorted(mine)])
        theirs = found.get((reference or "", cell), {})
        shared = sorted(mine.keys() & theirs.keys())
        if shared and method != reference:
            differences[method, cell] = estimate([mine[i] - theirs[i] for i in shared])
    # Metrics of several numbers, insertion and deletion, come first.
    order = sorted(dict.fromkeys(cell for _, cell in cells), key=lambda cell: cell[0] == cell[1])
    return Table(tuple(order), shown, cells, differences, reference)


def _check(asked: Sequence[str] | None, there: set[str], what: str) -> None:
    missing = [name for name in asked or () if name not in there]
    if missing and there:
        raise RelpropError(f"The {what} {missing[0]!r} was not measured; there are {', '.join(sorted(there))}.")


def scores(rows: Iterable[Row]) -> dict[tuple[str, Cell], dict[str, float]]:
    """By method and column, the number of each image.

    Raises:
        RelpropError: If an image has two of them.
    """
    found: dict[tuple[str, Cell], dict[str, float]] = {}
    for row in rows:
        for name, value in row.values.items():
            column = found.setdefault((row.method, (row.protocol or row.metric, name)), {})
            if row.image in column:
                what = " ".join(part for part in (row.metric, row.protocol) if part)
                raise RelpropError(
                    f"{row.image} has two rows of {row.method}, {what}, measured under different settings, which a "
                    "mean would mix; relprop evaluate with those you want prints the table of its own rows."
                )
            column[row.image] = value
    return found


def _title(cell: Cell) -> str:
    where, name = cell
    return name if name == where else f"{name} ({where})"


def _shown(value: Estimate | None) -> str:
    if value is None:
        return ""
    # What three decimals do not tell, such as a rounding error, and what is out of all proportion have an exponent.
    size = max(abs(value.low), abs(value.high))
    form = ".1e" if 0 < size < 0.0015 or size >= 10_000 else ".3f"
    return f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _markdown(table: Table) -> str:
    texts = []
    for head, *body in table.blocks():
        rule = ["---", *["---:"] * (len(head) - 1)]
        texts.append("\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body)))
    return "\n\n".join(texts)


def _latex(table: Table) -> str:
    texts = []
    for block in table.blocks():
        head, *body = (["\\%".join(c.split("%")).replace("_", "\\_") for c in line] for line in block)
        lines = [" & ".join(line) + " \\\\" for line in (head, *body)]
        lines[1:1] = ["\\midrule"]
        begin = ["\\begin{tabular}{l" + "r" * (len(head) - 1) + "}", "\\toprule"]
        texts.append("\n".join([*begin, *lines, "\\bottomrule", "\\end{tabular}"]))
    return "\n\n".join(texts)


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
