"""A forecast: the pieces of a study, its forward passes, and the hours that these take at the speed measured here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relprop.datasets import Sample
from relprop.errors import RelpropError
from relprop.study import pieces
from relprop.study.journal import JOURNAL
from relprop.study.loading import load
from relprop.study.output import Output
from relprop.study.progress import spoken
from relprop.study.request import Request
from relprop.study.runner import Runner

__all__ = ["Forecast", "Speed", "forecast", "speed"]

_IMAGES = 4


@dataclass(frozen=True)
class Speed:
    """Forward passes a second of one worker, all that is around them included.

    Attributes:
        rate: How many.
        how: With what it was measured.
    """

    rate: float
    how: str


@dataclass(frozen=True)
class Forecast:
    """What a study will be; ``print`` shows it.

    Attributes:
        images: Its images.
        batches: Their batches.
        groups: Groups of methods.
        done: Pieces that are done already.
        costs: Forward passes of an image, by method.
        speed: Of one worker.
        workers: How many there would be.
    """

    images: int
    batches: int
    groups: int
    done: int
    costs: Mapping[str, float]
    speed: Speed
    workers: int

    @property
    def pieces(self) -> int:
        """The pieces of the study."""
        return self.batches * self.groups

    @property
    def forwards(self) -> float:
        """Forward passes of all of it; one more an image and group finds the predicted class."""
        return self.images * (sum(self.costs.values()) + self.groups)

    @property
    def seconds(self) -> float:
        """How long one worker would take for what is not done."""
        return self.forwards / self.speed.rate * (1 - self.done / max(self.pieces, 1))

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {cost:g}" for name, cost in self.costs.items())
        total = f"{spoken(self.seconds)} of one worker"
        if self.workers > 1:
            total += f", {spoken(self.seconds / self.workers)} of {self.workers}"
        return "\n".join(
            [
                f"images    {self.images:,} in {self.batches:,} batches",
                f"pieces    {self.pieces:,}: {self.groups} group{'s' * (self.groups > 1)} of methods on every batch; "
                f"{self.done:,} done",
                f"forwards  {self.forwards:,.0f}; an image costs {costs}",
                f"speed     {self.speed.rate:.3g} forwards/s, measured with {self.speed.how}",
                f"time      {total}",
            ]
        )


def forecast(
    asked: Request, out: Output, workers: int = 1, measured: Callable[[Sequence[Sample]], Speed] | None = None
) -> Forecast:
    """Counts what a study would do, and measures how fast, on its first images; nothing is written.

    Args:
        asked: The study.
        out: Where its rows would be.
        workers: How many would work on it.
        measured: Measures the speed; by default here.

    Raises:
        RelpropError: If there are no images, or the first ones cannot be measured.
    """
    run = asked.run
    images = batches = done = 0
    first: Sequence[Sample] = ()
    there = out.folder is not None and (out.folder / JOURNAL).exists()
    with (out if there else Output(None)).journal() as journal:
        for batch in asked.batches():
            first = first or batch.samples[:_IMAGES]
            images, batches = images + len(batch.samples), batches + 1
            if there:
                every = (run.piece(batch, group).id for group in range(len(run.groups)))
                done += sum(journal.marked(piece) is not None for piece in every)
    if not first:
        raise RelpropError(f"{asked.data.name} has no images.")
    pace = measured(first) if measured is not None else speed(run, first)
    costs = {method.name: pieces.forwards(method, run.wanted) for method in run.named}
    return Forecast(images, batches, len(run.groups), done, costs, pace, workers)


def speed(run: Runner, samples: Sequence[Sample]) -> Speed:
    """Measures the cheapest method on some images, after the first of them was there to warm up with.

    Raises:
        RelpropError: If it cannot be measured.
    """
    costs = {method: pieces.forwards(method, run.wanted) for method in run.named}
    method = min(costs, key=lambda each: (costs[each] == 0, costs[each]))
    group = next(i for i, methods in enumerate(run.groups) if method in methods)
    rows, images, seconds = 0, 0, 0.0
    for some in (samples[:1], samples):
        begin = time.perf_counter()
        loaded = load(run.model, some)
        keys = {
            name: {pair: k for pair, k in every.items() if pair[0] is method}
            for name, every in run.of(loaded, group).items()
        }
        rows = sum(len(found) for _, found in run.measure(loaded, keys, ()))
        images, seconds = len(loaded.samples), time.perf_counter() - begin
    failures, _ = run.told()
    if not rows:
        why = failures[0][1] if failures else "nothing that was asked for can be had of them"
        raise RelpropError(f"The speed cannot be measured on the first images: {why}")
    return Speed(images * (costs[method] + 1) / seconds, f"{method.name} on {images} images")
