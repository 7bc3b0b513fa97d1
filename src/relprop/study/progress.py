"""Progress: how far a study is, how fast it goes, and what it has found so far."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relprop.study.journal import Row
from relprop.study.measure import Measure

__all__ = ["Mean", "Progress", "Tally"]


class Mean(NamedTuple):
    """A mean over the images so far.

    Attributes:
        mean: The mean.
        n: The number of images.
    """

    mean: float
    n: int


@dataclass(frozen=True)
class Progress:
    """A study under way; told after each method of each batch.

    Attributes:
        done: Images that are done, those of earlier runs included; a batch counts in part while it is worked on.
        total: Images of the study, or of its shard; None while that is not known.
        fresh: Images that this run has done.
        seconds: How long it took.
        means: By method, and protocol or metric: the mean of what speaks for it, such as the score of insertion and
            deletion.
        workers: By worker of a cluster, how many images a second it does; none where this process does all.
    """

    done: float
    total: int | None
    fresh: float
    seconds: float
    means: Mapping[tuple[str, str], Mean]
    workers: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        """Images a second; None before there is anything to go by."""
        return self.fresh / self.seconds if self.fresh and self.seconds > 0 else None

    @property
    def left(self) -> float | None:
        """Seconds that are left, if it goes on like this."""
        return (self.total - self.done) / self.rate if self.rate and self.total is not None else None

    def __str__(self) -> str:
        parts = [f"{int(self.done)}{'' if self.total is None else f' of {self.total}'} images"]
        if self.rate is not None:
            parts.append(f"{self.rate:.2g} images/s")
        if self.left is not None:
            parts.append(f"{spoken(self.left)} left")
        if self.workers:
            count, paces = len(self.workers), sorted(self.workers.values())
            between = f"{paces[0]:.2g} to {paces[-1]:.2g}" if count > 1 else f"{paces[0]:.2g}"
            parts.append(f"{count} worker{'s' if count > 1 else ''} of {between} images/s")
        return ", ".join(parts)


class Tally:
    """Adds up what comes in.

    Attributes:
        before: Images that earlier runs have done.
        fresh: Images that this run has done.
        workers: By worker, how many images a second it does.

    Args:
        total: Images of the study, or None.
        measures: What is measured.
    """

    def __init__(self, total: int | None, measures: Sequence[Measure]) -> None:
        self._total = total
        self.before = self.fresh = 0.0
        self.workers: dict[str, float] = {}
        self._main = {(m.metric, m.protocol): m.main for m in measures}
        self._sums: dict[tuple[str, str], Mean] = {}
        self._begin = time.monotonic()

    def add(self, rows: Iterable[Row]) -> None:
        """Takes rows in."""
        for row in rows:
            value = row.values.get(self._main.get((row.metric, row.protocol), ""))
            if value is not None:
                total, n = self._sums.get(column := (row.method, row.protocol or row.metric), (0.0, 0))
                self._sums[column] = Mean(total + value, n + 1)

    def progress(self, part: float = 0.0) -> Progress:
        """How far it is, with so many images more than are done."""
        means = {column: Mean(total / n, n) for column, (total, n) in self._sums.items()}
        fresh, seconds = self.fresh + part, time.monotonic() - self._begin
        done = round(self.before + fresh, 6)  # thirds of images may not add up to whole ones
        return Progress(done, self._total, round(fresh, 6), seconds, means, dict(self.workers))


def spoken(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
