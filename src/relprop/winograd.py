"""Winograd: convolutions of three by three with fewer products, compiled where there is a C compiler.

torch's own, which are oneDNN's, take them all. ``winograd.c`` says how; digits are as many as those of a plain
convolution, and zeros are zeros.

References:
    Lavin and Gray, 2016: Fast Algorithms for Convolutional Neural Networks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from relprop.fused import library

__all__ = ["Winograd"]

_TILES = 32
"""Fewer do not pay for reading kernels that are larger than plain ones."""
_BLOCK = 64


class _Task(ctypes.Structure):
    """A convolution, as ``winograd.c`` has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("a", "kernel", "bias", "weight", "y", "room")),
        *((name, ctypes.c_int64) for name in ("samples", "inputs", "outputs", "height", "width", "down", "across")),
        *((name, ctypes.c_int64) for name in ("blocks", "by_output", "by_input", "by_tap")),
        ("least", ctypes.c_float),
        ("relu", ctypes.c_int),
        ("threads", ctypes.c_int),
    ]


class Winograd:
    """A convolution of three by three and stride one.

    Args:
        weight: Kernel, ``(out, in, 3, 3)``, with any strides.
        bias: One value an output channel, or None.
        padding: Zeros on both sides of each axis.
        shape: That of an input, ``(B, in, height, width)``, and of no others.
        least: Outputs that are smaller than this, beside what they are made of, are computed directly where weights
            have one sign. With both, sums cancel out anyway.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, padding: Sequence[int], shape: Sequence[int], least: float = 0.0
    ) -> None:
        self.shape, self._least = torch.Size(shape), least if least and _one_signed(weight) else 0.0
        self._padding, self._bias = list(padding), None if bias is None else bias.contiguous()
        even = weight.stride(2) == 3 * weight.stride(3)
        self._weight = None if not self._least else weight if even else weight.contiguous()
        self._outputs = len(weight)
        self._kernel = _turned(weight)

    def __call__(self, a: Tensor, *, relu: bool = False) -> Tensor:
        """Convolves.

        Args:
            a: The input, ``(B, in, height, width)``.
            relu: Whether the output's negative values become zero.
        """
        compiled = library()
        assert compiled is not None
        last = torch.channels_last
        a = a.contiguous(memory_format=last)
        sides = [n + 2 * p - 2 for n, p in zip(a.shape[2:], self._padding, strict=True)]
        y = torch.empty((len(a), self._outputs, *sides), dtype=a.dtype, memory_format=last)
        threads = torch.get_num_threads()
        task = _Task(samples=len(a), inputs=a.shape[1], outputs=self._outputs, height=a.shape[2], width=a.shape[3])
        task.down, task.across = self._padding
        task.blocks = threads * max(1, round(_tiles(self.shape, self._padding) / (_BLOCK * threads)))
        task.least, task.relu, task.threads = self._least, relu, threads
        room = torch.empty(threads * compiled.winograd_room(ctypes.byref(task)), dtype=a.dtype)
        given = {"a": a, "kernel": self._kernel, "bias": self._bias, "weight": self._weight, "y": y, "room": room}
        for name, tensor in given.items():
            setattr(task, name, None if tensor is None else tensor.data_ptr())
        if self._weight is not None:
            task.by_output, task.by_input, _, task.by_tap = self._weight.stride()
        compiled.winograd(ctypes.byref(task))
        return y

    @staticmethod
    def fits(weight: Tensor, padding: Sequence[int], shape: Sequence[int]) -> bool:
        """Whether such a convolution can be computed, and is worth it; its stride, dilation and groups must be one."""
        lanes = _lanes()
        if not lanes or weight.shape[2:] != (3, 3) or weight.dtype != torch.float32 or not weight.is_cpu:
            return False
        return not (weight.shape[0] % (2 * lanes) or weight.shape[1] % lanes) and _tiles(shape, padding) >= _TILES


def _lanes() -> int:
    """How many numbers a register holds; none where there are no compiled functions."""
    compiled = library()
    return 0 if compiled is None else ctypes.c_int.in_dll(compiled, "lanes").value


def _one_signed(weight: Tensor) -> bool:
    low, high = weight.aminmax()
    return bool(low >= 0 or high <= 0)


def _tiles(shape: Sequence[int], padding: Sequence[int]) -> int:
    """How many squares of two by two the outputs of a batch are."""
    rows, columns = (max(n + 2 * p - 1, 0) // 2 for n, p in zip(shape[2:], padding, strict=True))
    return shape[0] * rows * columns


def _turned(weight: Tensor) -> Tensor:
    """``G g G'`` of every kernel, ``(out / wide, 16, in, wide)``."""
    g = weight.new_tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    taps = weight.unflatten(0, (-1, 2 * _lanes())).flatten(3).permute(0, 3, 2, 1)
    turned: Tensor = torch.kron(g, g) @ taps.flatten(2)
    return turned
