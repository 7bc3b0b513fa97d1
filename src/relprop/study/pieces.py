"""Pieces: a study cut into what is done, lost and done again as a whole.

A piece is a batch of images and some of the methods. Both follow from the study alone: the batches from the order of
the images, the groups of methods from what they cost by arithmetic. Whoever works on a piece, and whenever, explains
the same images together, so that even the last digits agree on like machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from relprop.datasets import Dataset, Sample, Stream
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.study.measure import Measure

__all__ = ["Batch", "Piece", "Shard", "batches", "count", "forwards", "groups"]

Shard: TypeAlias = tuple[int, int]
"""Which part of a study, from 1 on, and of how many."""

ENOUGH = 2000.0
"""Forward passes of a piece: about a minute of a CPU with ResNet-50, some seconds of a GPU."""


@dataclass(frozen=True)
class Batch:
    """Images that are explained together.

    Attributes:
        number: Which one of the study, from 0 on.
        samples: The images.
    """

    number: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Piece:
    """Some methods on a batch.

    Attributes:
        batch: The batch.
        group: Which group of methods, from 0 on.
        id: What it is known by when it is done.
        without: Names of images that are set aside.
    """

    batch: Batch
    group: int
    id: str
    without: frozenset[str] = frozenset()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The images that are not set aside."""
        return tuple(sample for sample in self.batch.samples if sample.name not in self.without)

    def __str__(self) -> str:
        return f"batch {self.batch.number}, group {self.group}"


def batches(data: Dataset | Stream, size: int, shard: Shard | None) -> Iterator[Batch]:
    """The batches of a study, or of a part of it: the same ones whoever computes them, and whenever.

    Raises:
        RelpropError: If there are no such batches.
    """
    if size < 1:
        raise RelpropError(f"The batch size is {size!r}; a batch has one image at least.")
    which, parts = shard or (1, 1)
    if not 1 <= which <= parts:
        raise RelpropError(f"There is no shard {which} of {parts}; those of sixteen are 1/16 to 16/16.")
    return _batches(iter(data), size, which - 1, parts)


def _batches(samples: Iterator[Sample], size: int, which: int, parts: int) -> Iterator[Batch]:
    number = 0
    while some := tuple(islice(samples, size)):
        if number % parts == which:
            yield Batch(number, some)
        number += 1


def count(data: Dataset | Stream, size: int, shard: Shard | None) -> int | None:
    """The images of all these batches; None where only reading them would tell."""
    total = data.count if isinstance(data, Stream) else len(data)
    if total is None:
        return None
    which, parts = shard or (1, 1)
    return sum(min(size, total - i * size) for i in range(which - 1, math.ceil(total / size), parts))


def forwards(method: Method, wanted: Iterable[Measure]) -> float:
    """Forward passes that a method costs on an image with all that is measured of it, by arithmetic."""
    wanted = [measure for measure in wanted if not measure.unfit(method)]
    explanations = any(measure.maps for measure in wanted) + sum(measure.explanations for measure in wanted)
    return explanations * method.cost + sum(measure.forwards for measure in wanted)


def groups(methods: Sequence[Method], wanted: Sequence[Measure], size: int) -> list[tuple[Method, ...]]:
    """Methods put together, in their order, until a batch of so many images is work enough."""
    made: list[tuple[Method, ...]] = []
    cost = math.inf
    for method in methods:
        if cost >= ENOUGH:
            made.append(())
            cost = 0.0
        made[-1] = (*made[-1], method)
        cost += size * forwards(method, wanted)
    return made
