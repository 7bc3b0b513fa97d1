"""Tents: relevance evened out over the steps of a stride.

A convolution or a pool that strides sees some of its inputs more often than others, and a strided 1x1 convolution three
of four never: what it hands down lies on a lattice, which the layers below carry to the pixels as a grid of dots. A
tent as wide as the stride, ``(t - |d|) / t^2`` at distance ``d``, gives every place of a step its part; it is the
transpose of linear interpolation, and loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["evened"]

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def evened(r: Tensor, stride: Sequence[int]) -> Tensor:
    """Spreads what lies at every place over its neighbours within a step; at a rim over those that are there.

    Args:
        r: Relevance, ``(T, B, channels, *spatial)``.
        stride: The step on each spatial axis.

    Returns:
        As much relevance, of the same shape.
    """
    if max(stride) == 1:
        return r
    sizes = r.shape[3:]
    kernel = _outer([_tent(t, r) for t in stride])
    inside = _outer([_kept(n, t, r) for n, t in zip(sizes, stride, strict=True)])
    flat = (r / inside).flatten(0, 1)
    channels = flat.shape[1]
    kernels = kernel.expand(channels, 1, *kernel.shape)
    padding = [t - 1 for t in stride]
    smooth: Tensor = _CONVOLUTIONS[len(sizes)](flat, kernels, padding=padding, groups=channels)
    return smooth.reshape(r.shape)


def _tent(t: int, like: Tensor) -> Tensor:
    return (t - torch.arange(1 - t, t, dtype=like.dtype, device=like.device).abs()) / t**2


def _kept(n: int, t: int, like: Tensor) -> Tensor:
    """How much of a tent over each of n places lies among them."""
    return F.conv1d(like.new_ones(1, 1, n), _tent(t, like)[None, None], padding=t - 1)[0, 0]


def _outer(vectors: Sequence[Tensor]) -> Tensor:
    return reduce(lambda product, v: product.unsqueeze(-1) * v, vectors)
