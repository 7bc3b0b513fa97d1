"""Tiles: elementwise steps taken one after another on pieces that stay in the processor's cache.

A step over a whole layer reads and writes all of it from memory, and several steps do so several times. Piece by piece,
only the first step reads from memory and only the last one writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SIZE = 1 << 17
"""Elements in a piece: five of them fit into the second-level caches of two cores."""


def tiles(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Pieces of tensors of one shape, which elementwise functions may take in turn and write to.

    Tensors that do not lie alike and without gaps in memory, or not in that of a processor, come whole.
    """
    first = tensors[0]
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in tensors)
    if not alike or first.numel() <= SIZE or first.device.type != "cpu" or not _dense(first):
        return [tensors]
    flat = [t.as_strided((t.numel(),), (1,), t.storage_offset()).split(SIZE) for t in tensors]
    return zip(*flat, strict=True)


def _dense(t: Tensor) -> bool:
    return t.is_contiguous() or (t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last))
