"""Pools: which inputs a pool's windows hold, and how a max pool hands relevance back.

A pool's window is a product of intervals, one an axis, so everything about it is said by one table an axis: row ``o``
lists the inputs that output ``o`` sees. Strides, padding, dilation, ``ceil_mode`` and adaptive sizes differ in these
tables and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relprop import fused
from relprop.errors import RelpropError
from relprop.maps import Window, uneven

Table = list[list[int]]
"""For every output along one axis, the inputs of its window that are not padding."""


@dataclass(frozen=True)
class Sliding:
    """Windows of one size that slide: ``MaxPool``, ``AvgPool``."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool = False

    def tables(self, sizes: Sequence[int]) -> list[Table]:
        """Lists the members of every window, axis by axis, for an input of these sizes."""
        return [
            self._axis(*args) for args in zip(sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        ]

    def _axis(self, size: int, kernel: int, stride: int, padding: int, dilation: int) -> Table:
        span = size + 2 * padding - dilation * (kernel - 1) - 1
        outputs = (-(-span // stride) if self.ceil else span // stride) + 1
        # As torch has it: a last window that would begin in the far padding is left out.
        if self.ceil and (outputs - 1) * stride >= size + padding:
            outputs -= 1
        if span < 0:
            msg = f"its window of {dilation * (kernel - 1) + 1} is larger than the input's {size}, padding included"
            raise RelpropError(msg)
        begins = [o * stride - padding for o in range(outputs)]
        return [[i for i in range(b, b + dilation * kernel, dilation) if 0 <= i < size] for b in begins]


@dataclass(frozen=True)
class Adaptive:
    """Windows that fill a given number of outputs: ``AdaptiveAvgPool``; None keeps the input's size."""

    outputs: tuple[int | None, ...]

    def tables(self, sizes: Sequence[int]) -> list[Table]:
        """Lists the members of every window, axis by axis, for an input of these sizes."""
        return [
            [list(range(o * n // m, -(-(o + 1) * n // m))) for o in range(m)]
            for n, m in zip(sizes, (m or n for n, m in zip(sizes, self.outputs, strict=True)), strict=True)
        ]


Windows = Sliding | Adaptive


def members(tables: Sequence[Table], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
    """Writes each table as a matrix of zeros and ones, ``(outputs, inputs)``."""
    matrices = []
    for table, size in zip(tables, sizes, strict=True):
        matrix = like.new_zeros(len(table), size)
        for output, inputs in enumerate(table):
            matrix[output, inputs] = 1
        matrices.append(matrix)
    return matrices


@dataclass(eq=False)
class Pool:
    """A pool: what it computes, and its windows.

    Args:
        windows: Where the windows lie.
        forward: The pool itself.
        kind: ``"max"`` or ``"average"``.
    """

    windows: Windows
    forward: Callable[[Tensor], Tensor]
    kind: str
    _maps: dict[tuple[object, ...], Window] = field(default_factory=dict, repr=False)

    @property
    def axes(self) -> int:
        """The number of axes that are pooled."""
        return len(self.windows.outputs if isinstance(self.windows, Adaptive) else self.windows.kernel)

    @property
    def steps(self) -> tuple[int, ...]:
        """How far apart its windows lie, if that makes them visit some inputs more than others."""
        w = self.windows
        return uneven(w.kernel, w.stride, w.dilation) if isinstance(w, Sliding) else ()

    def shape(self, before: Sequence[int]) -> tuple[int, ...]:
        """The shape that the pool makes of another."""
        lead = len(before) - self.axes
        return (*before[:lead], *map(len, self.windows.tables(before[lead:])))

    def average(self, a: Tensor) -> Window:
        """The pool as a linear map: an average with its own weights, the plain mean where it takes the maximum."""
        sizes = tuple(a.shape[a.ndim - self.axes :])
        key = (sizes, a.dtype, a.device)
        if key not in self._maps:
            matrices = members(self.windows.tables(sizes), sizes, a)
            count = Window(matrices, a.new_ones(())).fan((1, *sizes))[0, 0].clamp(min=1)
            # What torch divides by depends on three options; its answer for ones says it all.
            whole = 1.0 if self.kind == "max" else self.forward(a.new_ones(1, 1, *sizes))[0, 0]
            self._maps[key] = Window(matrices, whole / count, self._plain(sizes), self.steps)
        return self._maps[key]

    def _plain(self, sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]] | None:
        """Kernel, stride and padding, where torch knows windows of just this kind, and none sticks out."""
        w = self.windows
        if not isinstance(w, Sliding) or len(w.kernel) != 2 or w.dilation != (1, 1):
            return None
        inside = all(2 * p <= k for p, k in zip(w.padding, w.kernel, strict=True))
        as_floor = Sliding(w.kernel, w.stride, w.padding, w.dilation).tables(sizes) == w.tables(sizes)
        return (list(w.kernel), list(w.stride), list(w.padding)) if inside and as_floor else None

    def winners(self, a: Tensor, y: Tensor, r: Tensor) -> Tensor:
        """Hands each window's relevance to its largest input, evenly among those that tie.

        Args:
            a: Input of the pool, ``(B, C, *sizes)``.
            y: Its output.
            r: Relevance of the output, ``(T, B, C, *outputs)``.

        Returns:
            Relevance of the input, ``(T, B, C, *sizes)``.
        """
        if isinstance(self.windows, Sliding):
            return _sliding_winners(self.windows, a, y, r)
        sizes = tuple(a.shape[a.ndim - self.axes :])
        tables = self.windows.tables(sizes)
        # One pass a position in the window; short windows (at borders) point at input 0, with a mask of False.
        depths = [range(max(len(row) for row in table)) for table in tables]
        picks = []
        for position in product(*depths):
            index = [
                torch.tensor([row[d] if d < len(row) else 0 for row in t], device=a.device)
                for t, d in zip(tables, position, strict=True)
            ]
            real = [
                torch.tensor([d < len(row) for row in t], device=a.device)
                for t, d in zip(tables, position, strict=True)
            ]
            picks.append((index, real))
        hits = []
        for index, real in picks:
            hit = _select(a, index) == y
            for axis, mask in enumerate(real):
                hit &= mask.reshape(-1, *[1] * (self.axes - axis - 1))
            hits.append(hit)
        share = r / sum(hit.to(r.dtype) for hit in hits)
        result = r.new_zeros((*r.shape[: r.ndim - self.axes], *sizes))
        for (index, _), hit in zip(picks, hits, strict=True):
            _add(result, index, share * hit)
        return result


def _sliding_winners(windows: Sliding, a: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """:meth:`Pool.winners` for windows that slide: each position in the window is a slice of the padded input."""
    at_once = fused.winners(a, y, r, (windows.kernel, windows.stride, windows.padding, windows.dilation))
    if at_once is not None:
        return at_once
    axes = len(windows.kernel)
    outputs = y.shape[-axes:]
    around: list[int] = []
    for axis in reversed(range(axes)):
        reach = (outputs[axis] - 1) * windows.stride[axis] + windows.dilation[axis] * (windows.kernel[axis] - 1) + 1
        before = windows.padding[axis]
        around += [before, max(0, reach - before - a.shape[axis - axes])]
    padded = F.pad(a, around, value=torch.nan)  # which equals no maximum, not even that of nothing but -inf
    slices: list[tuple[Any, ...]] = [
        (
            ...,
            *(
                slice(k * d, k * d + (n - 1) * s + 1, s)
                for k, d, n, s in zip(position, windows.dilation, outputs, windows.stride, strict=True)
            ),
        )
        for position in product(*map(range, windows.kernel))
    ]
    hits = [padded[place] == y for place in slices]
    share = r / sum(hit.to(r.dtype) for hit in hits)
    result = torch.zeros_like(padded).expand(len(r), *padded.shape).clone(memory_format=torch.preserve_format)
    for place, hit in zip(slices, hits, strict=True):
        result[place].addcmul_(share, hit.to(r.dtype))
    for axis in range(axes):
        result = result.narrow(axis - axes, windows.padding[axis], a.shape[axis - axes])
    layout = torch.channels_last if a.ndim == 4 else torch.contiguous_format  # others would slow down what comes next
    dense: Tensor = result.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, r.shape[:2])
    return dense


def _select(a: Tensor, index: Sequence[Tensor]) -> Tensor:
    for axis, i in enumerate(index, start=a.ndim - len(index)):
        a = a.index_select(axis, i)
    return a


def _add(target: Tensor, index: Sequence[Tensor], values: Tensor) -> None:
    """Adds values at a grid of positions of the trailing axes, in place; positions may repeat."""
    first = target.ndim - len(index)
    for axis in reversed(range(1, len(index))):
        wide = values.new_zeros(
            (*values.shape[: first + axis], target.shape[first + axis], *values.shape[first + axis + 1 :])
        )
        values = wide.index_add_(first + axis, index[axis], values)
    target.index_add_(first, index[0], values)
