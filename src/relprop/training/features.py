"""Features: what the frozen part of a network makes of every photo, computed once and kept in files.

Augmentation costs a forward pass, so its variety is bounded: every photo has a fixed number of views. View 0 is the
crop that tests see; the others are random crops, mirrored or not, the same for every training seed. A file holds one
view of all photos, so asking for another view later computes that one alone. A run that is killed goes on from the
batch it was at.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from relprop import datasets, weights
from relprop.datasets import Dataset
from relprop.errors import RelpropError
from relprop.preparation import Preparation
from relprop.training.views import views

__all__ = ["Features", "Tick", "quiet"]

Tick = Callable[[int, int, str], None]
"""Told how many of how many are done, and of what."""

_BATCH = 16
_EVERY = 5.0
"""Seconds between two notes of how far it is."""


def quiet(*_: Any) -> None:
    """Tells nobody."""


@dataclass(frozen=True, eq=False)
class Features:
    """Features of the photos of a dataset.

    Attributes:
        rows: The place of each photo, by its path.
        arrays: One for each view, memory-mapped, a row a photo.
    """

    rows: dict[Path, int]
    arrays: tuple[NDArray[Any], ...]

    def take(self, paths: Sequence[Path], chosen: Sequence[int]) -> Tensor:
        """The features of some photos, of each in the view that was chosen for it."""
        found = [self.arrays[view][self.rows[path]] for path, view in zip(paths, chosen, strict=True)]
        return torch.from_numpy(np.stack(found)).float()

    @classmethod
    def of(
        cls,
        data: Dataset,
        frozen: nn.Module,
        preparation: Preparation,
        folder: Path,
        *,
        count: int = 1,
        workers: int = 2,
        tick: Tick = quiet,
    ) -> Features:
        """Computes what a folder does not hold yet.

        Args:
            data: The photos; their order does not matter.
            frozen: The frozen part, in evaluation mode.
            preparation: How the network wants its images.
            folder: Where features are kept, in a folder for each network and dataset.
            count: How many views.
            workers: Threads that decode.
            tick: Told how far it is.

        Raises:
            RelpropError: If a photo cannot be read, or its features are not finite.
        """
        samples = sorted(data, key=lambda sample: (sample.name, sample.path))
        key = {
            "frozen": weights.fingerprint(frozen),
            "preparation": preparation.written(),
            "photos": [[sample.name, sample.key] for sample in samples],
        }
        home = folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        home.mkdir(parents=True, exist_ok=True)
        _write(home / "about.json", json.dumps(key, indent=1))
        arrays = []
        for view in range(count):
            draw = views(data, preparation, "view", view)
            prepare = draw if view else preparation.prepared
            file = _File(home / f"view{view}.npy", len(samples))
            for batch in datasets.batches(samples[file.done :], prepare, _BATCH, workers=workers):
                file.add(_computed(frozen, batch.x))
                tick(file.done, len(samples), f"features of {data.name}, view {view + 1} of {count}")
            arrays.append(file.finished())
        return cls({sample.path: row for row, sample in enumerate(samples)}, tuple(arrays))


class _File:
    """A growing array in a ``.npy`` file of its final size; a note beside it tells how many rows are done."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.note, self.total = path, path.with_suffix(".json"), total
        self._array: NDArray[Any] | None = None
        self._noted = time.monotonic()
        try:
            self.done = int(json.loads(self.note.read_text())["done"])
            self._array = np.load(path, mmap_mode="r+")
            self.done = self.done if len(self._array) == total else 0
        except (OSError, ValueError, KeyError, TypeError):  # none, or cut short: from the beginning
            self.done = 0

    def add(self, rows: NDArray[Any]) -> None:
        if not self.done or self._array is None:
            self._array = np.lib.format.open_memmap(self.path, "w+", rows.dtype, (self.total, *rows.shape[1:]))
        array = self._array
        array[self.done : self.done + len(rows)] = rows
        self.done += len(rows)
        if self.done == self.total or time.monotonic() - self._noted > _EVERY:
            array.flush()  # type: ignore[attr-defined] # a memory map has it, an array does not
            _write(self.note, json.dumps({"done": self.done}))
            self._noted = time.monotonic()

    def finished(self) -> NDArray[Any]:
        self._array = None
        return np.asarray(np.load(self.path, mmap_mode="r"))  # rows of a plain array are found sooner


def _computed(frozen: nn.Module, x: Tensor) -> NDArray[Any]:
    """Features as they are kept: maps are rounded to 16 bits, which halves gigabytes; vectors are not."""
    device = next((p.device for p in frozen.parameters()), torch.device("cpu"))
    with torch.inference_mode():
        values: Tensor = frozen(x.to(device)).cpu()
    values = values.half() if values.ndim > 2 else values
    if not torch.isfinite(values).all():
        raise RelpropError("The frozen part gives features that are not finite, or too large for 16 bits.")
    found: NDArray[Any] = values.numpy()
    return found


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
