"""Feeds: where the batches of an epoch come from, photos or kept features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from relprop import datasets
from relprop.datasets import Dataset, Sample
from relprop.preparation import Preparation
from relprop.training.features import Features
from relprop.training.views import lot, views

__all__ = ["Feed", "Kept", "Photos", "shuffled"]

Pair = tuple[Tensor, Tensor]
"""Inputs and their classes."""


class Feed(Protocol):
    """Gives the batches of a dataset's samples."""

    def drawn(self, samples: Sequence[Sample], size: int, *words: object) -> Iterator[Pair]:
        """Batches for training: which view of each image, the words decide."""
        ...

    def plain(self, samples: Sequence[Sample], size: int) -> Iterator[Pair]:
        """Batches for validation and tests: every image as the model wants it."""
        ...


def shuffled(data: Dataset, seed: int, epoch: int, size: int, rank: int = 0, ranks: int = 1) -> list[Sample]:
    """The samples of an epoch in the order that its number decides; those of one device where there are several.

    All devices take as many steps, so that up to one image a device is left out; and no step has a single image, for
    which batch norms have no variance. Another epoch leaves out others.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(lot("order", seed, epoch))).tolist()
    mine = order[rank : len(order) // ranks * ranks : ranks]
    if len(mine) % size == 1 and len(mine) > 1:
        mine.pop()
    return [data[i] for i in mine]


@dataclass(frozen=True, eq=False)
class Photos:
    """Photos, decoded and cropped anew in every epoch.

    Attributes:
        preparation: How the network wants them.
        workers: Threads that decode.
    """

    preparation: Preparation
    workers: int = 2

    def drawn(self, samples: Sequence[Sample], size: int, *words: object) -> Iterator[Pair]:
        prepare = views(samples, self.preparation, *words)
        for batch in datasets.batches(samples, prepare, size, workers=self.workers):
            yield batch.x, batch.labels

    def plain(self, samples: Sequence[Sample], size: int) -> Iterator[Pair]:
        for batch in datasets.batches(samples, self.preparation.prepared, size, workers=self.workers):
            yield batch.x, batch.labels


@dataclass(frozen=True, eq=False)
class Kept:
    """Features, one of the views of each photo.

    Attributes:
        features: The features.
    """

    features: Features

    def drawn(self, samples: Sequence[Sample], size: int, *words: object) -> Iterator[Pair]:
        count = len(self.features.arrays)
        return self._batches(samples, [lot(*words, sample.name) % count for sample in samples], size)

    def plain(self, samples: Sequence[Sample], size: int) -> Iterator[Pair]:
        return self._batches(samples, [0] * len(samples), size)

    def _batches(self, samples: Sequence[Sample], chosen: Sequence[int], size: int) -> Iterator[Pair]:
        for i in range(0, len(samples), size):
            some = samples[i : i + size]
            x = self.features.take([sample.path for sample in some], chosen[i : i + size])
            yield x, torch.tensor([sample.label for sample in some])
