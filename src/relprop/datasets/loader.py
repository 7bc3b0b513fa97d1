"""Loading: images are decoded in threads, ahead of the model that waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from relprop.datasets.sample import Sample
from relprop.errors import RelpropError

__all__ = ["Batch", "batches"]


class Batch(NamedTuple):
    """Some samples, ready for a model.

    Attributes:
        x: Their inputs, ``(B, C, H, W)``.
        samples: The samples.
    """

    x: Tensor
    samples: tuple[Sample, ...]

    @property
    def labels(self) -> Tensor:
        """Their classes, ``(B,)``; -1 where there is none."""
        return torch.tensor([-1 if s.label is None else s.label for s in self.samples])


def batches(
    samples: Iterable[Sample],
    prepare: Callable[[Path], Tensor],
    size: int = 8,
    *,
    workers: int = 2,
    ahead: int = 2,
) -> Iterator[Batch]:
    """Batches of a dataset in order, decoded ahead of their use.

    Pillow decodes and resizes without holding Python's lock, so threads are enough, and they share the images with the
    model without copying them.

    Args:
        samples: A dataset, or any samples.
        prepare: From a path to an input, such as a loaded model's ``prepare``.
        size: How many samples a batch has; the last one may have fewer.
        workers: Threads that decode.
        ahead: Batches that are decoded before they are asked for; no more than these are held.

    Yields:
        The batches.

    Raises:
        RelpropError: If the size, the workers or the batches ahead are none, or an image cannot be read.
    """
    for name, value in (("size", size), ("workers", workers), ("ahead", ahead)):
        if value < 1:
            raise RelpropError(f"{name} must be at least 1, not {value}.")
    return _batches(iter(samples), prepare, size, workers, ahead)


def _batches(
    samples: Iterator[Sample], prepare: Callable[[Path], Tensor], size: int, workers: int, ahead: int
) -> Iterator[Batch]:
    pending: deque[list[tuple[Sample, Future[Tensor]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="relprop-decode")
    try:
        while True:
            while len(pending) <= ahead and (chosen := [*islice(samples, size)]):
                pending.append([(sample, pool.submit(prepare, sample.path)) for sample in chosen])
            if not pending:
                return
            batch = pending.popleft()
            yield Batch(torch.stack([future.result() for _, future in batch]), tuple(sample for sample, _ in batch))
    finally:  # also when whoever asked stops asking
        pool.shutdown(wait=False, cancel_futures=True)
