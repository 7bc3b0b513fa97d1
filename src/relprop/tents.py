"""Tents: strided maps that see their inputs evenly.

A convolution or a pool that strides sees some of its inputs more often than others, and a strided 1x1 convolution three
of four never: what it hands down lies on a lattice, which the layers below carry to the pixels as a grid of dots. Here
its contributions are those it would have if every input were first blended with its neighbours by a tent ``T`` as wide
as the stride ``t``, ``(t - |d|) / t^2`` at distance ``d``, and then weighed by its place:

    z_ji = (w T)_ji g_i a_i.

The weights ``g`` balance what places would get if all contributed alike: windows at a rim have fewer inputs, each of
which gets more, until the layers below have made a bright line of it. Every place of a step then has its part, in
proportion to its own activation where the rule has one, and nothing is lost.

Windows are products of intervals, so tents and weights are too: one matrix an axis does it all, where axes are short.

References:
    Sinkhorn and Knopp, 1967: Concerning nonnegative matrices and doubly stochastic matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from relprop.convolution import Convolution
from relprop.divisions import per_target
from relprop.maps import LinearMap, Transform, Window, contracted
from relprop.precision import precision

__all__ = ["Axis", "Tented", "tented"]

ROUNDS = 2
"""Of balancing. Many would make boxes of the tents: strides that begin at the first place never balance."""

LONG = 1024
"""Places of an axis that are too many for a matrix."""


def tented(linear: LinearMap, shape: Sequence[int]) -> LinearMap:
    """The map behind a tent, for inputs of ``shape`` (one sample's); the map itself if it visits all inputs alike.

    It is kept with the map, for the next call.
    """
    if not linear.steps:
        return linear
    known = linear.evened
    if known is None or known[0] != tuple(shape):
        known = linear.evened = tuple(shape), _tented(linear, shape)
    return known[1]


def _tented(linear: LinearMap, shape: Sequence[int]) -> LinearMap:
    sizes = shape[-len(linear.steps) :]
    axes = [Axis(*args) for args in zip(linear.windows(), linear.steps, sizes, strict=True)]
    if isinstance(linear, Window):
        return Window([axis.matrix(summed=True).to(linear.weight) for axis in axes], linear.weight)
    assert isinstance(linear, Convolution)  # nothing else has steps
    if max(sizes) >= LONG:
        return Tented(_Sliding(axes, shape[0], linear.weight), linear)
    # A kernel of one tap needs nothing between the places it looks at: only those are blended, and it strides no more.
    single = [taps == 1 for taps in linear.weight.shape[2:]]
    stride = [1 if one else t for one, t in zip(single, linear.stride, strict=True)]
    padding = [(0, 0) if one else p for one, p in zip(single, linear.padding, strict=True)]
    matrices = [axis.matrix(summed=one).to(linear.weight) for axis, one in zip(axes, single, strict=True)]
    return Tented(_Matrices(matrices), linear.strided(stride, padding))


class Axis:
    """The tent of one axis, and the weights of its places.

    Args:
        window: What an output sees along it.
        step: How wide the tent is on either side; where all inputs are seen alike it is one, and nothing changes.
        size: The number of its places.
        rounds: How often the weights are balanced.
    """

    def __init__(self, window: LinearMap, step: int, size: int, rounds: int = ROUNDS) -> None:
        self.heights = (step - torch.arange(1 - step, step, dtype=torch.float64).abs()) / step**2
        self._window, self._size = window, size
        self._tent = Convolution(self.heights[None, None], None, [1], [(step - 1, step - 1)], [1], 1)
        self.weights = torch.ones(size, dtype=torch.float64)
        for _ in range(rounds if step > 1 else 0):
            whole = self._seen(self.weights[None, None])
            back = window.transpose(torch.where(whole > 0, 1 / whole, 0.0), window.weight, (1, size))
            got = self.weights * self._tent(back)[0, 0]  # by each place, if each output hands out one
            reached = got > 0
            self.weights = torch.where(reached, self.weights * got[reached].mean() / got, self.weights)

    def matrix(self, *, summed: bool = False) -> Tensor:
        """``T_ki g_i``, or its sums over what each output sees, ``sum_k v_jk T_ki g_i``."""
        ones = torch.eye(self._size, dtype=torch.float64)[:, None]
        return (self._seen(ones) if summed else self._tent(ones))[:, 0].T * self.weights

    def _seen(self, x: Tensor) -> Tensor:
        """What outputs see through the tent."""
        return self._window.apply(self._tent(x), self._window.weight)


class _Matrices:
    """A blend by a matrix for each axis."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._ahead, self._back = matrices, [matrix.T for matrix in matrices]

    def ahead(self, a: Tensor) -> Tensor:
        return contracted(a, self._ahead)

    def back(self, c: Tensor) -> Tensor:
        return contracted(c, self._back)

    def sizes(self, before: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002 - told by the matrices
        return tuple(map(len, self._ahead))


class _Sliding:
    """A blend by a tent that slides, whatever the length of the axes."""

    def __init__(self, axes: Sequence[Axis], channels: int, like: Tensor) -> None:
        tent = _outer([axis.heights for axis in axes]).to(like)
        around = [(len(axis.heights) // 2,) * 2 for axis in axes]
        ones = [1] * len(axes)
        self._tent = Convolution(tent.expand(channels, 1, *tent.shape), None, ones, around, ones, channels)
        self._weights = _outer([axis.weights for axis in axes]).to(like)

    def ahead(self, a: Tensor) -> Tensor:
        return self._tent.apply(a * self._weights, self._tent.weight)

    def back(self, c: Tensor) -> Tensor:
        return self._tent.apply(c, self._tent.weight).mul_(self._weights)  # a tent is its own transpose

    def sizes(self, before: Sequence[int]) -> tuple[int, ...]:
        return tuple(before)


class Tented(LinearMap):
    """A map whose inputs are blended first.

    Args:
        blend: How.
        linear: The map.
    """

    def __init__(self, blend: _Matrices | _Sliding, linear: LinearMap) -> None:
        super().__init__(linear.weight, linear.bias)
        self._blend, self._linear = blend, linear

    def sums(self, a: Tensor, transform: Transform) -> Tensor:
        return self._linear.sums(self._blend.ahead(a), transform)

    def shares(self, s: Tensor, transform: Transform, shape: Sequence[int]) -> Tensor:
        return per_target(self._blend.back, self._linear.shares(s, transform, self._between(shape)))

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return self._linear.apply(self._blend.ahead(a), weight)

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        return self._blend.back(self._linear.transpose(s, weight, self._between(shape)))

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:
        return self._blend.back(self._linear.spread(s, self._between(shape)))

    def fan(self, shape: Sequence[int]) -> Tensor:
        with precision(self.weight.device):  # as exact as what is spread
            return super().fan(shape)

    def _between(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what was blended."""
        return (shape[0], *self._blend.sizes(shape[1:]))


def _outer(vectors: Sequence[Tensor]) -> Tensor:
    return reduce(lambda product, v: product.unsqueeze(-1) * v, vectors)
