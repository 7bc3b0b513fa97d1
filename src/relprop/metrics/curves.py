"""Curves: the probability of a class while the pixels of an image come or go.

A point of a curve is a mask, and each distinct mask is scored once: what ties, seeds and both curves have in common
costs one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relprop.metrics.ranking import Ranking
from relprop.metrics.scorer import Probabilities, probabilities

__all__ = ["Curve", "Curves", "Meter", "refined"]

Grid: TypeAlias = dict[tuple[str, int], list[int]]
"""For a kind of curve and an image: how many pixels are asked for at each point, ascending."""

KINDS = ("insertion", "deletion")

START, BUDGET, PER_ROUND = 9, 30, 4
"""Points of an adaptive curve: to begin with, at most, and new ones before the curve is looked at again."""
BOUND = 0.003
"""An adaptive curve is done when the error of its area is estimated to be below this."""
NARROWEST = 0.02
"""An interval this wide is not halved: a curve of 101 points would not see more of it."""


class Curve(NamedTuple):
    """Points of a curve, in order: the fraction of the pixels inserted or deleted, and the probability then.

    Both are ``(B, P)``. A curve with fewer points than others of the batch repeats its last one.
    """

    fraction: Tensor
    probability: Tensor


class Curves(NamedTuple):
    """Both curves."""

    insertion: Curve
    deletion: Curve


class _Mask(NamedTuple):
    kind: str
    image: int
    variant: int
    entered: int


class Meter:
    """Measures points of insertion and deletion curves, each distinct mask once, in batches across images.

    Args:
        x: The images, ``(B, C, *spatial)`` or ``(B, features)``.
        baseline: What stands in the place of missing pixels, ``(B or 1, ...)``.
        ranking: The order in which pixels, or patches, enter.
        patch: The side of a patch.
        scored: The classes to score of each image, ``(B, S)``.
        ends: The probabilities of those classes for the image and for its baseline, ``(B, S)`` each.
        score: Computes the probabilities of all classes.
        batch_size: Images scored at once.
    """

    def __init__(
        self,
        x: Tensor,
        baseline: Tensor,
        ranking: Ranking,
        patch: int,
        scored: Tensor,
        ends: tuple[Tensor, Tensor],
        score: Probabilities,
        batch_size: int,
    ) -> None:
        self.ranking = ranking
        self._x, self._baseline = x, baseline.expand(x.shape)
        self._patch, self._scored, self._score, self._batch_size = patch, scored, score, batch_size
        self.forwards = 0
        self._known: dict[_Mask, list[float]] = {}
        for image, (full, empty) in enumerate(zip(*(end.tolist() for end in ends), strict=True)):
            for kind, first, last in ((KINDS[0], empty, full), (KINDS[1], full, empty)):
                self._known[_Mask(kind, image, 0, 0)] = first
                self._known[_Mask(kind, image, 0, ranking.size)] = last

    def measure(self, grid: Grid) -> None:
        """Scores whatever of a grid has not been scored yet."""
        masks = (mask for (kind, image), ks in grid.items() for k in ks for mask in self._masks(kind, image, k))
        wanted = iter(dict.fromkeys(mask for mask in masks if mask not in self._known))
        while batch := list(islice(wanted, self._batch_size)):
            images = torch.tensor([mask.image for mask in batch], device=self._x.device)
            output = probabilities(self._score, self._masked(batch, images))
            self._known.update(zip(batch, output.gather(1, self._scored[images]).tolist(), strict=True))
            self.forwards += len(batch)

    def fractions(self, image: int, ks: Sequence[int]) -> npt.NDArray[np.float64]:
        """The true fractions of a curve's points, ``(P,)``."""
        return np.array([self.ranking.count(image, k) / self.ranking.size for k in ks])

    def curve(self, kind: str, image: int, ks: Sequence[int]) -> npt.NDArray[np.float64]:
        """The probabilities of a curve's points, ``(S, seeds, P)``."""
        seeds = len(self.ranking.seeds)
        points = [[self._known[mask] for mask in self._masks(kind, image, k)] for k in ks]
        return np.array([point if len(point) == seeds else point * seeds for point in points]).T  # P, seeds, S

    def _masks(self, kind: str, image: int, k: int) -> Iterable[_Mask]:
        count = self.ranking.count(image, k)
        return (_Mask(kind, image, variant, count) for variant in range(self.ranking.variants(image, k)))

    def _masked(self, batch: Sequence[_Mask], images: Tensor) -> Tensor:
        """The images of some masks: insertion keeps what has entered, deletion what has not."""
        device = self._x.device
        counts = torch.tensor([mask.entered for mask in batch], device=device)
        inserted = torch.tensor([mask.kind == KINDS[0] for mask in batch], device=device)
        positions = torch.stack([self.ranking.positions(mask.image, mask.variant) for mask in batch])
        kept = (positions < counts[:, None]) == inserted[:, None]
        spatial = self._x.shape[2:] or self._x.shape[1:]
        kept = kept.reshape(len(batch), *(n // self._patch for n in spatial))
        if self._patch > 1:
            for axis in range(1, kept.ndim):
                kept = kept.repeat_interleave(self._patch, axis)
        if self._x.ndim > 2:
            kept = kept[:, None]
        return torch.where(kept, self._x[images], self._baseline[images])


def refined(meter: Meter, images: int, bound: float = BOUND, budget: int = BUDGET) -> Grid:
    """A grid for each curve, finer where the curve bends.

    The trapezoid's error on an interval of width h is about h^3 |p''| / 12; p'' is taken from the slopes on both sides
    of a point. The worst intervals are halved until the errors' sum is below the bound, or the budget is spent. All
    curves are refined in step, so that every round is scored in full batches. Of several scored classes the first one
    decides.

    Args:
        meter: What scores the points.
        images: The number of images.
        bound: The error of the area to stop at.
        budget: The largest number of points of a curve.
    """
    size = meter.ranking.size
    start = sorted({round(i * size / (START - 1)) for i in range(START)})
    grid: Grid = {(kind, image): start for kind in KINDS for image in range(images)}
    while True:
        meter.measure(grid)
        finer = {}
        for (kind, image), asked in grid.items():
            counts = [meter.ranking.count(image, k) for k in asked]
            # Points that a tied block has made the same are one; the smallest k tells most of where the block begins.
            ks = [k for i, k in enumerate(asked) if i == 0 or counts[i] != counts[i - 1]]
            new = _bends(meter, kind, image, ks, bound, min(PER_ROUND, budget - len(ks)))
            finer[kind, image] = sorted({*ks, *new})
        if finer == grid:
            return grid
        grid = finer


def _bends(meter: Meter, kind: str, image: int, ks: list[int], bound: float, room: int) -> list[int]:
    """Where new points are most needed."""
    fraction, probability = meter.fractions(image, ks), meter.curve(kind, image, ks)[0].mean(0)
    width = np.diff(fraction)
    slope = np.diff(probability) / width
    inner = np.abs(np.diff(slope)) / ((width[1:] + width[:-1]) / 2)
    bend = np.maximum(np.append(inner, 0.0), np.insert(inner, 0, 0.0))
    if len(width) == 1:  # all is one tied block so far, and the chord all that is known of it
        bend = np.abs(slope) / width
    error = bend * width**3 / 12
    if error.sum() <= bound:
        return []
    new: list[int] = []
    for i in np.argsort(-error, kind="stable"):
        entered = meter.ranking.count(image, ks[i])
        middle = (entered + ks[i + 1]) // 2
        if len(new) < room and width[i] > NARROWEST and entered < middle < ks[i + 1]:
            new.append(middle)
    return new
