"""Tents: strided maps that see their inputs evenly.

A convolution or a pool that strides sees some of its inputs more often than others, and a strided 1x1 convolution three
of four never: what it hands down lies on a lattice, which the layers below carry to the pixels as a grid of dots. Here
its contributions are those it would have if every input were first blended with its neighbours by a tent as wide as the
stride ``t``, ``(t - |d|) / t^2`` at distance ``d``: ``z_ji = (w B)_ji a_i`` instead of ``w_ji a_i``. Every place of a
step then has its part, in proportion to its own activation where the rule has one, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from relprop.maps import LinearMap, Transform

__all__ = ["Tented", "blended", "handed", "tented"]

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def tented(linear: LinearMap) -> LinearMap:
    """The map behind a tent; the map itself if it visits all inputs alike."""
    return Tented(linear) if linear.steps else linear


class Tented(LinearMap):
    """A map whose inputs are blended first.

    Args:
        linear: The map, with steps.
    """

    def __init__(self, linear: LinearMap) -> None:
        super().__init__(linear.weight, linear.bias)
        self._linear = linear

    def sums(self, a: Tensor, transform: Transform) -> Tensor:
        return self._linear.sums(blended(a, self._linear.steps), transform)

    def shares(self, s: Tensor, transform: Transform, shape: Sequence[int], times: Tensor | None = None) -> Tensor:
        c = handed(self._linear.shares(s, transform, shape), self._linear.steps)
        return c if times is None else c.mul_(times)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return self._linear.apply(blended(a, self._linear.steps), weight)

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        return handed(self._linear.transpose(s, weight, shape), self._linear.steps)

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:
        return handed(self._linear.spread(s, shape), self._linear.steps)

    def fans(self, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        return self._linear.fans(shape)  # for a blend of ones is one

    def fan(self, shape: Sequence[int]) -> Tensor:
        return self._linear.fan(shape)


def blended(a: Tensor, steps: Sequence[int]) -> Tensor:
    """Each place's mean with its neighbours within a step, weighed by a tent; at a rim with those that are there.

    Args:
        a: Values, ``(..., channels, *spatial)``.
        steps: The step on each spatial axis.
    """
    return _convolved(a, steps).div_(_inside(a, steps))


def handed(c: Tensor, steps: Sequence[int]) -> Tensor:
    """The transpose of :func:`blended`: what each place has, over its neighbours; as much in all."""
    return _convolved(c / _inside(c, steps), steps)


def _convolved(x: Tensor, steps: Sequence[int]) -> Tensor:
    flat = x.reshape(-1, *x.shape[-len(steps) - 1 :])
    kernel = _outer([_tent(t, x) for t in steps])
    channels = flat.shape[1]
    kernels = kernel.expand(channels, 1, *kernel.shape)
    padding = [t - 1 for t in steps]
    return _CONVOLUTIONS[len(steps)](flat, kernels, padding=padding, groups=channels).reshape(x.shape)


def _inside(like: Tensor, steps: Sequence[int]) -> Tensor:
    """How much of a tent over each place lies within the map."""
    kept = (
        F.conv1d(like.new_ones(1, 1, n), _tent(t, like)[None, None], padding=t - 1)[0, 0]
        for n, t in zip(like.shape[-len(steps) :], steps, strict=True)
    )
    return _outer(list(kept))


def _tent(t: int, like: Tensor) -> Tensor:
    return (t - torch.arange(1 - t, t, dtype=like.dtype, device=like.device).abs()) / t**2


def _outer(vectors: Sequence[Tensor]) -> Tensor:
    return reduce(lambda product, v: product.unsqueeze(-1) * v, vectors)
