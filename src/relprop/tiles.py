"""Tiles: elementwise steps taken one after another on pieces that stay in the processor's cache.

A step over a whole layer reads and writes all of it from memory, and several steps do so several times. Piece by piece,
only the first step reads from memory and only the last one writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SIZE = 1 << 18
"""Elements in a piece: three of them fit into the second-level caches of two cores."""


def tileable(*tensors: Tensor) -> bool:
    """Whether tensors have one shape and lie alike and without gaps in a processor's memory."""
    first = tensors[0]
    alike = all(t.shape == first.shape and _steps(t) == _steps(first) for t in tensors[1:])
    return alike and first.device.type == "cpu" and _dense(first)


def tiles(*tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Pieces of tileable tensors ``(B, ...)``, none of more than one sample; elementwise functions may write to them.

    Yields:
        The number of the sample, and a piece of each tensor.
    """
    first = tensors[0]
    size = first.numel() // len(first)
    for sample in range(len(first)):
        for begin in range(0, size, SIZE):
            shape, at = (min(SIZE, size - begin),), sample * size + begin
            yield sample, [t.as_strided(shape, (1,), t.storage_offset() + at) for t in tensors]


def _dense(t: Tensor) -> bool:
    return t.is_contiguous() or (t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last))


def _steps(t: Tensor) -> list[int]:
    """The strides of the axes that have more than one element; those of others mean nothing."""
    return [step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]
