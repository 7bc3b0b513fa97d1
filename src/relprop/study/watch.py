"""Watching a study: a bar and running means on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from relprop.study.progress import Progress, spoken

__all__ = ["Watch"]

EVERY = 30.0
"""Seconds between two lines of a log."""

_SHOWN = 16


class Watch:
    """Shows a study's progress while it is entered; pass it as ``progress``.

    Args:
        console: Where to show it.
        every: Seconds between two lines, where that is no terminal.

    Attributes:
        last: What it was told last, or None.
    """

    def __init__(self, console: Console, every: float = EVERY) -> None:
        self.last: Progress | None = None
        self._console = console
        self._every = every
        self._said: Progress | None = None
        self._when = 0.0
        self._bar = Bar(TextColumn("images"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._task = self._bar.add_task("", total=None)
        self._live = Live(self._bar, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Watch:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.last is not None and self.last is not self._said:
            self._say(self.last)

    def __call__(self, progress: Progress) -> None:
        """Shows how far it is."""
        self.last = progress
        if self._live is not None:
            self._bar.update(
                self._task, completed=int(progress.done), total=progress.total, description=_pace(progress)
            )
            more = [means(progress)] if progress.means else []
            more += [paces(progress)] if progress.workers else []
            self._live.update(Group(self._bar, *more))
        elif progress.fresh and (self._said is None or time.monotonic() - self._when >= self._every):
            self._say(progress)

    def _say(self, progress: Progress) -> None:
        self._said, self._when = progress, time.monotonic()
        self._console.print(str(progress))


def _pace(progress: Progress) -> str:
    if progress.rate is None:
        return ""
    left = "" if progress.left is None else f", {spoken(progress.left)} left"
    return f"{progress.rate:.2g} images/s{left}"


def paces(progress: Progress) -> Table:
    """The workers of a cluster, each with its images a second."""
    table = Table("worker", box=None, pad_edge=False)
    table.add_column("images/s", justify="right")
    for name, pace in list(progress.workers.items())[:_SHOWN]:
        table.add_row(name, f"{pace:.2g}")
    if len(progress.workers) > _SHOWN:
        table.add_row(f"and {len(progress.workers) - _SHOWN} more", "")
    return table


def means(progress: Progress) -> Table:
    """The running means: a line a method, a column a protocol or metric; in brackets, over how many images."""
    columns = list(dict.fromkeys(column for _, column in progress.means))
    table = Table("method", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for method in dict.fromkeys(method for method, _ in progress.means):
        found = [progress.means.get((method, column)) for column in columns]
        table.add_row(method, *("" if mean is None else f"{mean.mean:.3g} ({mean.n})" for mean in found))
    return table
