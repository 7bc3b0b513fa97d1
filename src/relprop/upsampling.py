"""Upsampling: interpolation and transposed convolutions.

Both are linear maps, so the plan's rules serve them. Interpolation works axis by axis: one small matrix each says which
inputs an output is made of, and with which weights; bicubic ones may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.mapped import Mapped
from relprop.maps import LinearMap, Window, contracted
from relprop.operators import Operator, Ref, bound, refs, register


class Resampling(Window):
    """Weighted sums over windows whose weights differ; what is handed on evenly goes to all that have any.

    Its parameters are two numbers, 1 and -1, which the positive and the negative weights are multiples of.
    """

    def __init__(self, members: Sequence[Tensor]) -> None:
        super().__init__(members, members[0].new_tensor([1.0, -1.0]))
        self._seen = [(matrix != 0).to(matrix.dtype) for matrix in members]
        signs = [[(0, m.clamp(min=0)), *([(1, -m.clamp(max=0))] if (m < 0).any() else [])] for m in members]
        self._parts = [(sum(s for s, _ in part) % 2, [m for _, m in part]) for part in product(*signs)]

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        parts = [contracted(a, matrices) * weight[sign] for sign, matrices in self._parts]
        return sum(parts[1:], start=parts[0])

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002 - told by the windows
        parts = [contracted(s, [m.T for m in matrices]) * weight[sign] for sign, matrices in self._parts]
        return sum(parts[1:], start=parts[0])

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002 - told by the windows
        return contracted(s, [seen.T for seen in self._seen])

    def fan(self, shape: Sequence[int]) -> Tensor:
        return contracted(self.weight.new_ones((1, *shape)), self._seen)


@dataclass(eq=False)
class Interpolation(Mapped):
    """A change of resolution along the trailing axes.

    Attributes:
        function: From the input, and numbers that come from shapes, to the output.
    """

    function: Callable[..., Tensor]

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    @property
    def makers(self) -> tuple[int, ...]:
        return tuple(range(1, len(self.inputs)))

    def map(self, *values: Any) -> LinearMap:
        a: Tensor = values[0]
        sizes = a.shape[2:]
        whole = self.function(a.new_zeros((1, 1, *sizes), device="meta"), *values[1:]).shape[2:]
        matrices = []
        for axis, size in enumerate(sizes):
            # One element along the other axes, a basis vector along this one: a row of outputs tells its column.
            basis = torch.eye(size, dtype=a.dtype, device=a.device)
            basis = basis.reshape(size, 1, *[size if k == axis else 1 for k in range(len(sizes))])
            if whole < sizes:  # one element along an axis could not shrink
                basis = basis.expand(size, 1, *sizes).contiguous()
            columns = self.function(basis, *values[1:])
            line = columns[(slice(None), 0, *[slice(None) if k == axis else 0 for k in range(len(sizes))])]
            matrices.append(line.reshape(size, whole[axis]).T)
        return Resampling(matrices)


@register(F.interpolate, F.upsample, numbers=True)
def _interpolate(x: Ref, *args: Any, **kwargs: Any) -> Operator:
    inputs = refs(((x, *args), kwargs))
    return Interpolation("interpolate", tuple(inputs), bound(F.interpolate, (x, *args), kwargs))


@register(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
def _upsample(m: nn.Upsample, x: Ref) -> Operator:
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
    return _interpolate(x, **{name: getattr(m, name) for name in names})


class Overlap(LinearMap):
    """Patches summed where they overlap: ``F.fold``, whose transpose is ``F.unfold``.

    Args:
        like: Any tensor of the patches' kind.
        size: Height and width of what the patches are summed to.
        settings: Kernel, dilation, padding and stride.
    """

    def __init__(self, like: Tensor, size: Any, settings: Sequence[Any]) -> None:
        super().__init__(like.new_ones(()))
        self._size, self._settings = size, settings

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return F.fold(a, self._size, *self._settings) * weight

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002 - told by the size
        return F.unfold(s * weight, *self._settings)


@dataclass(eq=False)
class Folding(Mapped):
    """``F.fold``."""

    size: Any
    settings: tuple[Any, ...]

    def forward(self, *values: Any) -> Any:
        return F.fold(values[0], self.size, *self.settings)

    def map(self, *values: Any) -> LinearMap:
        return Overlap(values[0], self.size, self.settings)


@register(F.fold)
def _fold(x: Ref, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Operator:
    return Folding("fold", (x,), output_size, (kernel_size, dilation, padding, stride))


register(nn.Fold)(lambda m, x: _fold(x, m.output_size, m.kernel_size, m.dilation, m.padding, m.stride))


class TransposedConvolution(LinearMap):
    """A transposed convolution over one to three axes."""

    def __init__(self, weight: Tensor, bias: Tensor | None, settings: Sequence[Any]) -> None:
        super().__init__(weight, None if bias is None else bias.reshape(-1, *[1] * (weight.ndim - 2)))
        self._stride, self._padding, self._output_padding, self._groups, self._dilation = settings

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten.convolution(
            a, weight, None, self._stride, self._padding, self._dilation, True, self._output_padding, self._groups
        )
        return y

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        none = [0] * len(self._stride)
        y: Tensor = torch.ops.aten.convolution(
            s, weight, None, self._stride, self._padding, self._dilation, False, none, self._groups
        )
        for axis, n in enumerate(shape[1:], start=2):  # output padding adds what no input reaches
            y = y.narrow(axis, 0, n)
        return y


@dataclass(eq=False)
class Upconvolution(Mapped):
    """A transposed convolution."""

    linear: TransposedConvolution
    weighted = True

    def forward(self, *values: Any) -> Any:
        return self.linear(values[0])

    def shape(self, *values: Any) -> Any:
        return self.linear.apply(values[0], self.linear.weight.to("meta"))

    def map(self, *values: Any) -> LinearMap:  # noqa: ARG002 - the same for every input
        return self.linear


def _conv_transpose(
    axes: int,
    x: Ref,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Operator:
    def each(value: int | Sequence[int]) -> list[int]:
        return [value] * axes if isinstance(value, int) else list(value)

    settings = (each(stride), each(padding), each(output_padding), groups, each(dilation))
    return Upconvolution(f"conv_transpose{axes}d", (x,), TransposedConvolution(weight, bias, settings))


def _conv_transpose_module(axes: int, m: nn.ConvTranspose2d, x: Ref) -> Operator:
    weight, bias = m.weight.detach(), None if m.bias is None else m.bias.detach()
    return _conv_transpose(axes, x, weight, bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation)


for _axes in (1, 2, 3):
    _name = f"conv_transpose{_axes}d"
    register(getattr(F, _name), getattr(torch, _name))(partial(_conv_transpose, _axes))
    register(getattr(nn, f"ConvTranspose{_axes}d"))(partial(_conv_transpose_module, _axes))
