"""Rankings: the order in which the pixels of a heatmap enter, and what becomes of those that tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relprop.errors import RelpropError

__all__ = ["TIES", "Ranking", "Reduction", "heat", "numbered", "patched", "seed_of"]

TIES = ("random", "stable", "block")

Reduction: TypeAlias = str | Callable[[Tensor], Tensor]
"""How ``(B, C, *spatial)`` becomes ``(B, *spatial)``: a name, or a function that does it."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda maps: maps.sum(1),
    "mean": lambda maps: maps.mean(1),
    "max": lambda maps: maps.amax(1),
    "abs": lambda maps: maps.abs().sum(1),
    "first": lambda maps: maps[:, 0],
}


def heat(values: Any, shape: Sequence[int], reduce: Reduction = "sum") -> Tensor:
    """Heatmaps of one channel.

    Args:
        values: ``(B, *spatial)``, or with an axis of channels behind the batch.
        shape: The ``(B, *spatial)`` that is wanted.
        reduce: What becomes of the channels: ``"sum"``, ``"mean"``, ``"max"``, ``"abs"`` (the sum of absolute values),
            ``"first"``, or a function.

    Raises:
        RelpropError: If the maps do not fit, are not finite, or the reduction is not known.
    """
    shape = tuple(shape)
    try:
        maps: Tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError):
        raise RelpropError(f"The maps are a {type(values).__name__}; pass a tensor or an array.") from None
    if maps.ndim == len(shape) + 1 and maps.shape[:1] + maps.shape[2:] == shape and maps.shape[1]:
        reduction = REDUCTIONS.get(reduce) if isinstance(reduce, str) else reduce
        if not callable(reduction):
            raise RelpropError(f"The reduction {reduce!r} is unknown; pass {_listed(REDUCTIONS)}, or a function.")
        maps = reduction(maps)
        if not isinstance(maps, Tensor):
            raise RelpropError(f"The reduction gives a {type(maps).__name__}; it has to give a tensor.")
    if tuple(maps.shape) != shape:
        raise RelpropError(
            f"The maps have shape {tuple(maps.shape)}; they have to be {shape}, with or without channels behind the "
            "batch, so resize them to the input first."
        )
    if maps.is_complex() or not torch.isfinite(maps).all():
        raise RelpropError("The maps have complex, NaN or infinite values, which have no order; clean them.")
    return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()


def patched(maps: Tensor, patch: int) -> Tensor:
    """The mean of every patch of ``(B, *spatial)`` maps.

    Raises:
        RelpropError: If the patches do not tile the maps, or the maps have more than three spatial axes.
    """
    if patch == 1:
        return maps
    spatial = maps.shape[1:]
    pools = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
    if not _whole(patch) or len(spatial) not in pools or any(n % patch for n in spatial):
        size = "x".join(map(str, spatial))
        raise RelpropError(f"Patches of {patch!r} do not tile maps of {size}; pass a number that divides every side.")
    return pools[len(spatial)](maps[:, None], patch)[:, 0]


def numbered(indices: Any, count: int) -> list[int]:
    """A number for each sample: those given, else 0, 1, ...

    Raises:
        RelpropError: If they are not one a sample.
    """
    try:
        numbers = list(range(count)) if indices is None else [int(i) for i in indices]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or any(n < 0 for n in numbers):
        raise RelpropError(f"indices has to be {count} numbers from 0 on, one a sample.")
    return numbers


def seed_of(seed: int, number: int) -> int:
    """A seed for torch that a seed and a sample's number decide."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


class Ranking:
    """Which pixels (or patches) are the first k of each map, the highest values first.

    Every pixel has a position, the number of pixels that enter before it, and the first k are those of a position
    below k. A tied block that enters as one shares its position; then the first k may be more than k.

    Args:
        values: One row a map, ``(B, N)``.
        ties: ``"random"``, an order of the tied pixels for each seed; ``"stable"``, by their index; ``"block"``, all
            at once.
        seeds: The seeds, for random ties.
        indices: A number for each map; with the seed it decides the order of tied pixels.
    """

    def __init__(self, values: Tensor, ties: str, seeds: Sequence[int] = (0,), indices: Sequence[int] = ()) -> None:
        self.ties = ties
        self.seeds = tuple(seeds) if ties == "random" else (0,)
        self.size = values.shape[1]
        self._indices = tuple(indices) or tuple(range(len(values)))
        self._device = values.device
        self._values = values.cpu().numpy()
        self._ascending = np.sort(self._values, axis=1)
        self._positions: dict[tuple[int, int], Tensor] = {}

    def count(self, image: int, k: int) -> int:
        """How many pixels really are in when the first k are asked for."""
        return self._boundary(image, k) if self.ties == "block" else k

    def variants(self, image: int, k: int) -> int:
        """In how many ways the first k are chosen: once for each seed where k splits a tie, else once."""
        return len(self.seeds) if self._boundary(image, k) != k else 1

    def positions(self, image: int, variant: int) -> Tensor:
        """The position of every pixel of a map, ``(N,)``."""
        key = image, variant
        if key not in self._positions:
            self._positions[key] = torch.from_numpy(self._ordered(image, variant)).to(self._device)
        return self._positions[key]

    def _ordered(self, image: int, variant: int) -> Any:
        values = self._values[image]
        if self.ties == "block":
            greater = self.size - np.searchsorted(self._ascending[image], values, side="right")
            return greater.astype(np.int32)
        first = np.arange(self.size)
        if self.ties == "random":
            first = np.random.default_rng([self.seeds[variant], self._indices[image]]).permutation(self.size)
        positions = np.empty(self.size, dtype=np.int32)
        positions[first[np.argsort(-values[first], kind="stable")]] = np.arange(self.size, dtype=np.int32)
        return positions

    def _boundary(self, image: int, k: int) -> int:
        """The number of pixels that are no lower than the k-th: k where no tie is split, else more."""
        if k == 0:
            return 0
        ascending = self._ascending[image]
        return self.size - int(np.searchsorted(ascending, ascending[self.size - k], side="left"))


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
