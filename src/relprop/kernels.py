"""Kernels: convolutions whose weights are packed once, for processors on which oneDNN computes them.

torch packs the weights anew at every call. Its own compiler does it once, through operators that also take a ReLU into
the same pass over memory; they are used here where they are there and agree, and plain ones elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from relprop.precision import shortened
from relprop.winograd import Winograd

__all__ = ["Kernel", "Packed", "packable", "packed"]


class Packed:
    """A convolution over two axes, with its weights packed.

    Args:
        weight: Kernel, ``(out, in / groups, height, width)``.
        bias: One value an output channel, or None.
        stride: Step on each axis.
        padding: Zeros on both sides of each axis.
        dilation: Spacing on each axis.
        groups: Number of groups.
        shape: That of an input, for which the weights are laid out; others are taken too, but slowly.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        shape: Sequence[int],
    ) -> None:
        self.shape = shape
        self._bias = bias
        self._how = list(padding), list(stride), list(dilation), groups
        self._weight = torch.ops.mkldnn._reorder_convolution_weight(weight.contiguous(), *self._how, list(shape))

    def __call__(self, a: Tensor, *, relu: bool = False) -> Tensor:
        """Convolves.

        Args:
            a: The input, ``(B, in, height, width)``.
            relu: Whether the output's negative values become zero.
        """
        convolve, then = torch.ops.mkldnn._convolution_pointwise, "relu" if relu else "none"
        y: Tensor = convolve(a, self._weight, self._bias, *self._how, then, [], "")
        return y


Kernel = Packed | Winograd
"""A convolution over two axes that is ready for inputs of a shape."""


How = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding, dilation and groups, as of :class:`Packed`."""


def packed(weight: Tensor, bias: Tensor | None, how: How, shape: Sequence[int], least: float = 0.0) -> Kernel:
    """Packs weights for the kernel that is fastest; :class:`Packed` and :class:`Winograd` explain what it takes."""
    stride, padding, dilation, groups = how
    if groups == 1 and [*stride, *dilation] == [1] * 4 and Winograd.fits(weight, padding, shape):
        return Winograd(weight, bias, padding, shape, least)
    return Packed(weight, bias, *how, shape)


def packable(a: Tensor) -> bool:
    """Whether convolutions of such inputs can be packed."""
    return a.is_cpu and a.dtype == torch.float32 and a.ndim == 4 and not shortened(a) and _there()


@cache
def _there() -> bool:
    """Whether the operators are there, and compute what torch's convolution does."""
    a, weight = torch.linspace(0, 1, 144).reshape(1, 16, 3, 3), torch.linspace(-1, 1, 256).reshape(16, 16, 1, 1)
    bias = torch.linspace(-4, 4, 16)
    plain = ([1, 1], [0, 0], [1, 1])
    try:
        packed = Packed(weight, bias, *plain, 1, a.shape)
        expected = torch.ops.aten.convolution(a, weight, bias, *plain, False, [0, 0], 1)
        return all(
            torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
            for found, wanted in (
                (packed(a), expected),
                (packed(a, relu=True), expected.relu()),
            )
        )
    except (AttributeError, RuntimeError):  # another build of torch
        return False
