"""Divisions: how a rule divides relevance by what contributions sum up to.

Exact denominators may be zero: what such outputs hold goes evenly to the inputs they really have. Stabilised ones never
are, and what the stabiliser takes is summed up on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relprop import fused
from relprop.dues import Due, memory
from relprop.ledger import total
from relprop.maps import LinearMap, Transform
from relprop.tiles import tileable, tiles
from relprop.transforms import over, tiny


def note(absorbed: dict[str, Tensor], cause: str, amount: Tensor | None) -> None:
    """Adds to what a cause has absorbed."""
    if amount is not None:
        absorbed[cause] = absorbed[cause] + amount if cause in absorbed else amount


def per_target(function: Callable[..., Tensor], s: Tensor, *args: Any) -> Tensor:
    """Calls a function of a batch on ``(T, B, ...)``."""
    result: Tensor = function(s.flatten(0, 1), *args).unflatten(0, s.shape[:2])
    return result


def steadied(r: Tensor | Due, z: Tensor, eps: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Divides by ``z + eps sign(z)``, with the bias in ``z``, which is written over where that can be.

    Args:
        r: Relevance, ``(T, B, ...)``.
        z: What contributions and bias sum up to, ``(B, ...)``.
        eps: The stabiliser, one or one a sample.
        bias: What the bias adds to ``z``, without a batch axis, or None.

    Returns:
        The quotient; and what eps and the bias take, ``(T, B)``.
    """
    if fused.fits(z, r=r):
        s = _room(r, z)
        beside = bias is not None and _a_channel(bias, s) and s.stride(2) == 1
        taken, biased = fused.steady(r, z, s, eps, bias if beside else None)
        if bias is not None and beside:
            return s, taken, biased
    else:
        r = fused.taken(r)
        if len(r) == 1 and tileable(r[0], z):
            s, taken = _in_pieces(r[0], z, eps)
        else:
            eps = torch.where(z < 0, -eps, eps)
            s = r / (z + eps)
            taken = total(s * eps)
    return s, taken, None if bias is None else shared(s, bias)


def _room(r: Tensor | Due, z: Tensor) -> Tensor:
    """Where a quotient goes: over the denominators, if there is one target."""
    return z[None] if len(memory(r)) == 1 else torch.empty_like(memory(r))


def _in_pieces(r: Tensor, z: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    taken = [0.0] * len(r)
    for sample, (above, below) in tiles(r, z):
        signed = torch.copysign(eps[sample].flatten() if eps.ndim else eps, below)
        torch.div(above, below.add_(signed), out=below)
        taken[sample] += signed.mul_(below).sum().item()
    return z[None], torch.tensor([taken], dtype=torch.float64)


def _a_channel(bias: Tensor, s: Tensor) -> bool:
    """Whether a bias has one value a channel."""
    return bias.numel() == bias.shape[0] == s.shape[2] and bias.ndim == s.ndim - 2


def shared(s: Tensor, bias: Tensor) -> Tensor:
    """What a bias takes: ``sum_j s_j b_j``, ``(T, B)``."""
    if _a_channel(bias, s):
        return s.flatten(3).sum(3).double() @ bias.flatten().double() if s.ndim > 3 else s.double() @ bias.double()
    return total(s * bias)


def shares(
    linear: LinearMap, s: Tensor, transform: Transform, shape: Sequence[int], times: Tensor | None
) -> Tensor | Due:
    """What the inputs get of quotients, times the inputs if they count: due, where whoever needs it can take that."""
    c = linear.shares(s, transform, shape)
    if times is None:
        return c
    if fused.fits(times, r=c):
        return Due(c, times)
    return c * times if 0 in c.stride() else c.mul_(times)  # a mean's is an expanded view


def divide(
    linear: LinearMap, r: Tensor | Due, z: Tensor, shape: Sequence[int], absorbed: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Divides relevance by exact denominators.

    Returns:
        ``r / z``, zero at outputs without contributions; and what those hand to their inputs evenly, or None.
    """
    threshold = tiny(z.dtype)
    if fused.fits(z, r=r):
        s = _room(r, z)
        if not fused.divide(r, z, s, threshold):
            return s, None
        orphaned = fused.taken(r) * (s == 0)
    else:
        r = fused.taken(r)
        low = z.amin() if z.device.type == "cpu" else None  # an accelerator would have to stop for the answer
        # Denominators have one sign within a part, so the one nearest to zero is at one end.
        if low is not None and (low > threshold or z.amax() < -threshold):
            return over(r, z), None
        dead = z.abs() <= threshold
        orphaned = r * dead
        s = over(r, z.masked_fill(dead, torch.inf))
    fan, unseen = linear.fans(shape)
    if unseen is not None:
        note(absorbed, "padding", total(orphaned * unseen))
    return s, per_target(linear.spread, orphaned.div_(fan), shape)
