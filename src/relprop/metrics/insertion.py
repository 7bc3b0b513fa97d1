"""The insertion and deletion metric: how fast a class appears, or vanishes, with the pixels a heatmap ranks highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relprop import requests
from relprop.errors import RelpropError
from relprop.metrics.baselines import baseline_of
from relprop.metrics.curves import KINDS, Curve, Curves, Grid, Meter, refined
from relprop.metrics.ranking import TIES, Ranking, Reduction, heat, numbered, patched
from relprop.metrics.scorer import Probabilities, classes, fastest, probabilities

__all__ = ["PUBLISHED_STEP", "InsertionDeletion", "Scores", "insertion_deletion", "published_places"]

PROTOCOLS = ("otsuki2024",)
PUBLISHED_STEP = 500
POINTS = 26


@dataclass(frozen=True, eq=False)
class Scores:
    """Insertion and deletion of a batch of heatmaps.

    Where several classes of a sample were scored, every tensor has an axis of them behind that of the batch.

    Attributes:
        insertion: Area under each insertion curve, ``(B,)``, between 0 and 1; higher is better.
        deletion: Area under each deletion curve, ``(B,)``; lower is better.
        score: Insertion minus deletion, the ID score, ``(B,)``.
        curves: Both curves, each with its axis of fractions; means over the seeds.
        spread: Standard deviation of the ID score over the seeds, ``(B,)``; zero where no tie had to be broken, or
            there is one seed.
        forwards: Images that were scored for all of it.
    """

    insertion: Tensor
    deletion: Tensor
    score: Tensor
    curves: Curves
    spread: Tensor
    forwards: int

    def only(self, scored: int) -> Scores:
        """The scores of one of several classes."""
        curves = Curves(*(Curve(fraction, probability[:, scored]) for fraction, probability in self.curves))
        numbers = {name: getattr(self, name)[:, scored] for name in ("insertion", "deletion", "score", "spread")}
        return replace(self, curves=curves, **numbers)


def insertion_deletion(
    model: Any,
    x: Tensor,
    maps: Tensor,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    ties: str = "random",
    seeds: int | Sequence[int] = 3,
    baseline: str | float | Tensor = "black",
    normalization: Any = None,
    points: int | str | Sequence[int] | None = None,
    step: int | None = None,
    patch: int = 1,
    scored: int | Sequence[int] | Tensor | None = None,
    reduce: Reduction | None = None,
    protocol: str | None = None,
    indices: Sequence[int] | Tensor | None = None,
    batch_size: int = 64,
    scorer: Probabilities | None = None,
) -> Scores:
    """Scores heatmaps by inserting, and by deleting, the pixels they rank highest.

    Insertion starts from the baseline and puts the image's pixels in, deletion starts from the image and takes them
    out; the curve is the softmax probability of a class over the true fraction of pixels, from 0 to 1 with both ends,
    and its area is a trapezoid. After Petsiuk et al. (2018), *RISE: Randomized Input Sampling for Explanation of
    Black-box Models*, and Samek et al. (2017), *Evaluating the Visualization of What a Deep Neural Network Has
    Learned*.

    Pixels that tie have no order of their own, and a metric that gives them one favours coarse maps or punishes them.
    By default the order is random and the scores are means over several; a mask that all orders share is scored once.

    ``protocol="otsuki2024"`` is the protocol behind the figures of Otsuki et al. (2024), to the letter of their code:
    point i takes the value at rank 500 (i + 1) as a threshold, the last rank clipped to the last pixel, and moves every
    pixel that is no lower. There is no point at zero, tied pixels move together while the axis still counts 500 a point
    (so the area is over equally spaced points), missing pixels are black, and of a map with channels only the first is
    ranked. It scores the ground truth while the methods explain the predicted class: pass the former as ``scored``.

    Args:
        model: A module in evaluation mode that returns logits, or what ``relprop.load`` returns.
        x: Normalised inputs, ``(B, C, *spatial)`` or ``(B, features)``.
        maps: Heatmaps, ``(B, *spatial)``, or with channels, like the input.
        target: The explained class: None for the predicted one, a number for all, or one a sample.
        ties: ``"random"``; ``"stable"``, in the order of the pixels' index; ``"block"``, the whole tied group at once,
            its true size on the axis.
        seeds: How many random orders, or their seeds.
        baseline: ``"black"``, ``"mean"`` (the normalisation's mean pixel: zero once normalised), ``"blur"`` (a Gaussian
            of 11 pixels with a sigma of 5, as RISE's), or a tensor that broadcasts to the input.
        normalization: Mean and standard deviation of the channels, if the model does not tell.
        points: Points of a curve, ends included: 26 unless told; ``"adaptive"`` for 9 to 101, more where the curve
            bends; or how many pixels (or patches) are in at each of them, to which both ends are added. Of the
            published curve, which has 101, so many are taken, at equal distances. Compared with 101 points, at a
            quarter of their cost, 26 changed the area of 95 % of 180 real maps by less than 0.014 and its mean by 0.003
            to 0.004, adaptive ones that of 95 % of 60 by less than 0.004 and its mean by 0.0001.
        step: Pixels between two points, in place of ``points``.
        patch: Side of the patches that move together, ranked by their mean; 1 for pixels.
        scored: The class whose probability is taken, if it is another than the explained one: the ground truth, say.
            Several of each sample, ``(B, S)``, cost no more than one.
        reduce: What becomes of the maps' channels: ``"sum"`` unless told, ``"mean"``, ``"max"``, ``"abs"``, ``"first"``
            or a function.
        protocol: None, or ``"otsuki2024"``, which settles ``ties``, ``patch`` and ``reduce``.
        indices: A number for each sample, which together with a seed decides how its ties are broken; 0, 1, ... unless
            told. With it, results do not depend on how samples are batched.
        batch_size: Images made and scored at once.
        scorer: Computes ``(n, classes)`` probabilities of n images, in place of the model; by default a
            `relprop.metrics.Scorer`, measured where there is enough to score, else the model as it is.

    Returns:
        The scores, in float64.

    Raises:
        RelpropError: If the request cannot be met; the message names the thing and the remedy.
    """
    if scorer is not None and not callable(scorer):
        raise RelpropError(f"The scorer is {requests.brief(scorer)}; pass a function from images to probabilities.")
    requests.check_input(x, requests.module(model) if scorer is None else nn.Identity())
    settings = _settings(ties, seeds, points, step, patch, reduce, protocol, batch_size)
    spatial = x.shape[2:] or x.shape[1:]
    values = patched(heat(maps, (len(x), *spatial), settings.reduce).to(x.device), settings.patch)
    ranking = Ranking(values.flatten(1), settings.ties, settings.seeds, numbered(indices, len(x)))
    ks, axis = _points(settings, ranking.size, settings.patch ** len(spatial))
    told = normalization if normalization is not None else getattr(model, "normalization", None)
    empty = baseline_of(baseline, x, told)
    x = x.detach()
    score = scorer or fastest(model, x, forwards=2 * len(ks) * len(x))

    full = torch.cat([probabilities(score, part) for part in x.split(batch_size)])
    nothing = torch.cat([probabilities(score, part) for part in empty.split(batch_size)])
    asked = classes(target, full) if scored is None else requests.targets(scored, full.shape)
    assert asked is not None  # for a class is scored
    chosen = asked.to(full.device).reshape(len(x), -1)
    ends = full.gather(1, chosen), nothing.expand(full.shape).gather(1, chosen)
    meter = Meter(x, empty, ranking, settings.patch, chosen, ends, score, batch_size)
    if settings.adaptive:
        grid = refined(meter, len(x))
    else:
        grid = {(kind, image): ks for kind in KINDS for image in range(len(x))}
        meter.measure(grid)
    scores = _scores(meter, grid, axis, len(x), forwards=meter.forwards + len(x) + len(empty))
    return scores if asked.ndim > 1 else scores.only(0)


class InsertionDeletion:
    """Insertion and deletion over many batches, scored by the fastest engine that agrees with the model.

    Args:
        model: As for :func:`insertion_deletion`.
        **options: Its other arguments, but for ``indices``: samples are numbered in the order in which they come, so
            that the result does not depend on how they are batched.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.options = options
        self.reset()

    def reset(self) -> None:
        """Forgets all samples."""
        self._seen: list[Scores] = []
        self._count = 0

    def update(
        self,
        x: Tensor,
        maps: Tensor,
        target: int | Sequence[int] | Tensor | None = None,
        scored: int | Sequence[int] | Tensor | None = None,
    ) -> Scores:
        """Scores a batch; see :func:`insertion_deletion`.

        Returns:
            The scores of this batch.
        """
        options = {"scorer": None, **self.options}
        if options["scorer"] is None:
            requests.check_input(x, requests.module(self.model))
            options["scorer"] = fastest(self.model, x)
        indices = range(self._count, self._count + len(x))
        scores = insertion_deletion(self.model, x, maps, target, scored=scored, indices=indices, **options)
        self._seen.append(scores)
        self._count += len(x)
        return scores

    def compute(self) -> dict[str, float]:
        """The means over all samples, and how many they were.

        Returns:
            ``insertion``, ``deletion``, ``score``, ``spread`` and ``images``.

        Raises:
            RelpropError: If there are none.
        """
        if not self._seen:
            raise RelpropError("There is nothing to compute a mean of; call update with a batch first.")
        names = ("insertion", "deletion", "score", "spread")
        means = {name: float(torch.cat([getattr(scores, name) for scores in self._seen]).mean()) for name in names}
        return {**means, "images": float(self._count)}


@dataclass(frozen=True)
class _Settings:
    ties: str
    seeds: tuple[int, ...]
    points: int | tuple[int, ...] | None
    adaptive: bool
    step: int | None
    patch: int
    reduce: Reduction
    published: bool


def _settings(
    ties: Any, seeds: Any, points: Any, step: Any, patch: Any, reduce: Any, protocol: Any, batch_size: Any
) -> _Settings:
    """The request, checked."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise RelpropError(f"The protocol {protocol!r} is unknown; pass 'otsuki2024', or None for the tie-safe one.")
    told = not isinstance(points, int | str | None)
    if protocol is not None:
        if (ties, patch, reduce) != ("random", 1, None) or points == "adaptive" or told:
            raise RelpropError(f"The protocol {protocol!r} settles ties, places, patch and reduce; leave them out.")
        ties, reduce, step = "block", "first", PUBLISHED_STEP if step is None else step
    if ties not in TIES:
        raise RelpropError(f"Ties can be broken by 'random', 'stable' or 'block', not by {ties!r}.")
    adaptive = isinstance(points, str) and points == "adaptive"
    if told and isinstance(points, Sequence) and points and _naturals(points):
        points = tuple(points)
    elif not adaptive and points is not None and (not isinstance(points, int) or points < 2):
        raise RelpropError(f"points is {points!r}; pass a number of at least 2, 'adaptive', or a list of numbers.")
    for name, number in (("step", 1 if step is None else step), ("patch", patch), ("batch_size", batch_size)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RelpropError(f"{name} is {number!r}; pass a positive number.")
    if adaptive and step is not None:
        raise RelpropError("Adaptive points have no fixed step; leave out step= or points='adaptive'.")
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    if isinstance(seeds, str | bool) or not isinstance(chosen, Sequence) or not chosen or not _naturals(chosen):
        raise RelpropError(f"seeds is {seeds!r}; pass how many, or a list of numbers from 0 on.")
    fixed = None if adaptive else points  # adaptive ones are about as many as there are by default
    return _Settings(ties, tuple(chosen), fixed, adaptive, step, patch, reduce or "sum", protocol is not None)


def _points(settings: _Settings, size: int, pixels: int) -> tuple[list[int], Any]:
    """How many of all patches, of so many pixels, are in at each point; and the axis if it is not the true fraction."""
    if settings.published:
        assert not isinstance(settings.points, tuple)  # the request was checked
        return published_places(size, settings.points, settings.step or PUBLISHED_STEP)
    if settings.step is not None:
        return [*range(0, size, max(1, settings.step // pixels)), size], None
    points = settings.points or POINTS
    if isinstance(points, tuple):
        return sorted({0, *(min(k, size) for k in points), size}), None
    return sorted({round(i * size / (points - 1)) for i in range(points)}), None


def published_places(size: int, points: int | None = None, step: int = PUBLISHED_STEP) -> tuple[list[int], Any]:
    """How many of all pixels are in at the points of the published curve, or at some of them; and its axis.

    Raises:
        RelpropError: If there are too few pixels for a curve.
    """
    ks = [min(step * (i + 1), size - 1) + 1 for i in range(math.ceil(size / step))]
    if len(ks) < 2:
        raise RelpropError(f"{size} pixels are one point of {step}, and no curve; pass a smaller step=.")
    some = np.unique(np.linspace(0, len(ks) - 1, points or len(ks)).round().astype(int))
    return [ks[i] for i in some], some / (len(ks) - 1)


def _scores(meter: Meter, grid: Grid, axis: Any, images: int, forwards: int) -> Scores:
    areas, curves = {}, {}
    longest = max(map(len, grid.values()))
    for kind in KINDS:
        area, fractions, means = [], [], []
        for image in range(images):
            ks = grid[kind, image]
            ks = [*ks, *ks[-1:] * (longest - len(ks))]
            fraction = meter.fractions(image, ks) if axis is None else axis
            probability = meter.curve(kind, image, ks)
            area.append(((probability[..., 1:] + probability[..., :-1]) / 2 * np.diff(fraction)).sum(-1))
            fractions.append(fraction)
            means.append(probability.mean(1))
        areas[kind] = torch.from_numpy(np.array(area))
        curves[kind] = Curve(torch.from_numpy(np.array(fractions)), torch.from_numpy(np.array(means)))
    insertion, deletion = (areas[kind] for kind in KINDS)
    difference = insertion - deletion
    spread = difference.std(-1) if difference.shape[-1] > 1 else torch.zeros_like(difference[..., 0])
    return Scores(
        insertion=insertion.mean(-1),
        deletion=deletion.mean(-1),
        score=difference.mean(-1),
        curves=Curves(*(curves[kind] for kind in KINDS)),
        spread=spread,
        forwards=forwards,
    )


def _naturals(numbers: Sequence[Any]) -> bool:
    return all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0 for n in numbers)
