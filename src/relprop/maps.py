"""Linear maps: what a convolution, a matrix, a pool or a batch norm looks like to a rule.

A rule never asks which layer it stands at. It sees contributions ``z_ji = w_ji a_i`` of inputs ``i`` to outputs ``j``,
and three things it can do with them: :meth:`LinearMap.apply` sums them over ``i``, :meth:`LinearMap.transpose` over
``j``, and :meth:`LinearMap.spread` hands something evenly to the inputs that an output really has (padding is not one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from relprop.precision import precision

Transform = Callable[[Tensor], Tensor]
"""An elementwise change of weights, such as their positive part."""


class LinearMap(ABC):
    """A map ``y_j = sum_i w_ji a_i + b_j`` with weights that rules may change.

    Attributes:
        weight: Parameters from which every ``w_ji`` comes, elementwise.
        bias: Bias in a shape that broadcasts to one sample's output, or None.
        steps: How far apart windows lie on each spatial axis, if that makes them visit some inputs more than others.
    """

    steps: tuple[int, ...] = ()

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._changed: dict[Transform, Tensor] = {}
        self._weighed: dict[Transform, tuple[tuple[int, ...], Tensor]] = {}
        self._fans: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self.evened: tuple[tuple[int, ...], LinearMap] | None = None  # for the shape that came last; see relprop.tents

    def __call__(self, a: Tensor) -> Tensor:
        """Applies the map as the model does, bias included."""
        y = self.apply(a, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def activated(self, a: Tensor) -> Tensor:
        """The ReLU of what the model computes."""
        return self(a).relu_()

    def sums(self, a: Tensor, transform: Transform) -> Tensor:
        """:meth:`apply`, with transformed weights."""
        return self.apply(a, self.weights(transform))

    def weighed(self, shape: Sequence[int], transform: Transform) -> Tensor:
        """:meth:`sums` of ones in ``shape`` (one sample's), a batch of one; kept for the shape that came last."""
        known = self._weighed.get(transform)
        if known is None or known[0] != tuple(shape):
            with precision(self.weight.device):  # what is kept is exact, whatever is asked for now
                sums = self.sums(self.weight.new_ones((1, *shape)), transform)
            known = self._weighed[transform] = tuple(shape), sums
        return known[1].clone()  # for who asks may write over it

    def shares(self, s: Tensor, transform: Transform, shape: Sequence[int]) -> Tensor:
        """:meth:`transpose`, with transformed weights, of ``(T, B, ...)``."""
        c: Tensor = self.transpose(s.flatten(0, 1), self.weights(transform), shape).unflatten(0, s.shape[:2])
        return c

    def weights(self, transform: Transform) -> Tensor:
        """Returns the transformed weights, computed once in the life of this map."""
        if transform not in self._changed:
            self._changed[transform] = self._packed(transform(self.weight))
        return self._changed[transform]

    def _packed(self, weight: Tensor) -> Tensor:
        """Lays weights out as :meth:`apply` likes them best."""
        return weight

    @abstractmethod
    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        """Sums the contributions of a batch of inputs: ``sum_i w_ji a_i``, without bias."""

    @abstractmethod
    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        """Sums over the outputs instead: ``sum_j w_ji s_j``, for inputs of ``shape`` (one sample's)."""

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:
        """Gives each output's ``s_j`` to every input it really has, ``sum_j s_j`` over the ``j`` that see ``i``."""
        return self.transpose(s, torch.ones_like(self.weight), shape)

    def fan(self, shape: Sequence[int]) -> Tensor:
        """Counts the real inputs of every output unit, for inputs of ``shape``; a batch of one."""
        ones = self.weight.new_ones((1, *shape))
        return self.apply(ones, torch.ones_like(self.weight))

    def windows(self) -> list[LinearMap]:
        """Each spatial axis by itself, as sums in float64 over what an output sees; none for a map without steps."""
        return []

    def fans(self, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """:meth:`fan`, one where it is none, and where that is; None if nowhere. Computed once for each shape."""
        key = tuple(shape)
        if key not in self._fans:
            fan = self.fan(shape)
            self._fans[key] = (fan, None) if fan.all() else (fan.masked_fill(fan == 0, 1.0), fan == 0)
        return self._fans[key]


def uneven(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """The steps of windows that slide, one where every input of an axis is visited alike; none if all are."""
    steps = []
    for k, t, d in zip(kernel, stride, dilation, strict=True):
        visits = [sum(d * tap % t == place for tap in range(k)) for place in range(t)]
        steps.append(t if len(set(visits)) > 1 else 1)
    return tuple(steps) if max(steps) > 1 else ()


class Dense(LinearMap):
    """A matrix on the last axis: ``nn.Linear``."""

    def shape(self, before: Sequence[int]) -> tuple[int, ...]:
        """The shape that the map makes of another, which it fits."""
        return (*before[:-1], self.weight.shape[0])

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:
        # Summed by torch, pairwise: a product with ones would round thousands of equal numbers to the same side.
        return s.sum(-1, keepdim=True).expand(*s.shape[:-1], shape[-1])

    def fan(self, shape: Sequence[int]) -> Tensor:
        return self.weight.new_full((1, *shape[:-1], self.weight.shape[0]), shape[-1])

    def scaled(self, scale: Tensor, shift: Tensor) -> Dense:
        """The map followed by one factor and one shift an output: a batch norm folded in."""
        bias = shift if self.bias is None else self.bias * scale + shift
        return Dense(self.weight * scale.unsqueeze(1), bias)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return F.linear(a, weight)

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002 - told by weight
        return s @ weight


class Window(LinearMap):
    """Weighted sums over windows of the trailing axes, the same in every channel: every kind of average pool.

    A window is a product of intervals, so the map is a product of one matrix an axis, and its transpose that of their
    transposes. The one parameter is what each output multiplies its window's sum with.

    Args:
        members: For each of the trailing axes, how much each output sees of each input: ``(outputs, inputs)``, of zeros
            and ones unless places are weighed.
        scale: Factor of each output, of the outputs' spatial shape.
        sliding: Kernel, stride and padding of windows of two axes that torch can sum by itself, which is faster.
        steps: As of every map.
    """

    def __init__(
        self,
        members: Sequence[Tensor],
        scale: Tensor,
        sliding: tuple[list[int], list[int], list[int]] | None = None,
        steps: tuple[int, ...] = (),
    ) -> None:
        super().__init__(scale)
        self._members, self._sliding, self.steps = list(members), sliding, steps

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        if self._sliding and a.ndim == 4:
            kernel, stride, padding = self._sliding
            return F.avg_pool2d(a, kernel, stride, padding, divisor_override=1).mul_(weight)
        return contracted(a, self._members) * weight

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        if self._sliding and s.ndim == 4:
            kernel, stride, padding = self._sliding
            like = torch.empty((len(s), *shape), dtype=s.dtype, device=s.device, memory_format=torch.channels_last)
            ones = weight.new_ones((shape[0], 1, *kernel))
            back: Tensor = torch.ops.aten.convolution_backward(
                s * weight, like, ones, None, stride, padding, [1, 1], False, [0, 0], shape[0], [True, False, False]
            )[0]
            return back
        return contracted(s * weight, [m.T for m in self._members])

    def windows(self) -> list[LinearMap]:
        return [Window([matrix.cpu().double()], torch.ones((), dtype=torch.float64)) for matrix in self._members]


_FEW = 16
"""Channels that fill a processor's register."""


def contracted(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiplies each of the trailing axes of a batch with a matrix."""
    lead = x.shape[: x.ndim - len(matrices)]
    x = x.reshape(lead[0], prod(lead[1:]), *x.shape[len(lead) :])
    # Channels last: each axis is then one batched matrix product over whole rows of channels, if those are not short.
    few = x.shape[1] < _FEW
    x = x if few else x.movedim(1, -1)
    for axis, matrix in enumerate(matrices, start=2 if few else 1):
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        if after:
            x = (matrix @ x.reshape(prod(before), x.shape[axis], prod(after))).reshape(*before, -1, *after)
        else:
            x = x @ matrix.T
    x = x if few else x.movedim(-1, 1)
    return x if len(lead) == 2 else x.reshape(*lead, *x.shape[2:])


class Mean(LinearMap):
    """The mean over some axes of a sample: ``x.mean((2, 3))``, or their sum with ``scale=1``.

    Args:
        axes: Axes of the batch (never 0), counted from the front.
        keep: Whether they stay, with one element.
        scale: Factor of the sum, a tensor of no axes.
    """

    def __init__(self, axes: Sequence[int], keep: bool, scale: Tensor) -> None:
        super().__init__(scale)
        self._axes, self._keep = sorted(axes), keep

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return a.sum(self._axes, keepdim=self._keep) * weight

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        if not self._keep:
            for axis in self._axes:
                s = s.unsqueeze(axis)
        return (s * weight).expand(s.shape[0], *shape)


class Diagonal(LinearMap):
    """One factor a channel, and a bias: a batch norm that could not be folded into what stands before it."""

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return a * weight

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002 - the output's
        return s * weight
