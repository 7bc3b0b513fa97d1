"""Transforms: what rules do to inputs and weights, and how they divide."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.maps import Transform


def over(r: Tensor, z: Tensor) -> Tensor:
    """Divides relevance ``(T, B, ...)`` by denominators ``(B, ...)`` that nobody needs after: written over.

    Fresh memory costs as much as the division itself.
    """
    ours = r.shape == z[None].shape and 0 not in z.stride()
    return torch.div(r, z[None], out=z[None]) if ours else r / z


def tiny(dtype: torch.dtype) -> float:
    """The size below which a denominator counts as zero: what is smaller has lost its digits (float32: 1e-30)."""
    return torch.finfo(dtype).tiny * 1e8


def same(x: Tensor) -> Tensor:
    """The thing itself."""
    return x


def positive(x: Tensor) -> Tensor:
    """Its positive part."""
    return x.clamp(min=0)


def negative(x: Tensor) -> Tensor:
    """Its negative part (a number that is not positive)."""
    return x.clamp(max=0)


def square(x: Tensor) -> Tensor:
    """Its square."""
    return x * x


def one_sample(x: Tensor) -> Tensor:
    """Ones for an input: the same in every sample, so a batch of one is enough."""
    return torch.ones_like(x[:1])


@dataclass(frozen=True)
class Boosted:
    """A weight and ``gamma`` times its positive or negative part."""

    gamma: float
    part: Transform

    def __call__(self, w: Tensor) -> Tensor:
        """Returns ``w + gamma w+`` (or ``w-``)."""
        return w + self.gamma * self.part(w)


@dataclass(frozen=True)
class Above:
    """How far an input lies above (or ``below``) a bound; a bound that the input exceeds is widened to it."""

    bound: float | tuple[float, ...]
    below: bool = False

    def __call__(self, a: Tensor) -> Tensor:
        """Returns ``a - bound``, at least (at most) zero."""
        bound = torch.as_tensor(self.bound, dtype=a.dtype, device=a.device)
        if bound.ndim:
            if bound.numel() != a.shape[1]:
                msg = (
                    f"zbox has bounds for {bound.numel()} channels, but its layer's input has {a.shape[1]}; pass "
                    "low= and high=."
                )
                raise RelpropError(msg)
            bound = bound.reshape(-1, *[1] * (a.ndim - 2))
        return negative(a - bound) if self.below else positive(a - bound)
