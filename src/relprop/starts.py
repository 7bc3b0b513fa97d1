"""Starts: the relevance that outputs begin with, before the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relprop import requests
from relprop.errors import RelpropError

__all__ = ["Beginning", "start"]

CONTRAST = "contrast"
"""The start that sets a class against the others."""

BETA = 4.0
"""How much so."""

IMPROBABLE = 1e-20
"""A class below this takes no part in it: processors are slow with numbers that are nearly none."""

_OF_CLASSES = ("probability", "logit", CONTRAST)

Beginning = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From output and targets to the relevance to start with, ``(T, B, classes)``, and its unit, ``(T, B)``."""


def start(value: Any, target: Tensor | None, output: Sequence[int], layer: str | None = None) -> Beginning:
    """How the sweep begins: with one at each target, scaled afterwards, so that tiny probabilities do not underflow.

    Args:
        value: What was asked for; None for the class' probability, or the values of a hidden layer. A function gets
            the output and gives a start at every class.
        target: The targets.
        output: The shape of the output.
        layer: The hidden layer at which it begins, if any.

    Raises:
        RelpropError: If the start is unknown, or does not fit the target.
    """
    hidden = layer is not None
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "value" if hidden else "logit": lambda y: y.double(),
        "one": lambda y: torch.ones_like(y).double(),
    }
    if not hidden:
        kinds = {"probability": _probabilities, **kinds}
    if not hidden and len(output) == 2:
        kinds[CONTRAST] = _probabilities
    if value is None:
        value = next(iter(kinds))
    if isinstance(value, str) and value in kinds:
        if len(output) > 2:
            return lambda y, t: _at_places(t, y, kinds[value](y), everywhere=hidden)
        begin = _contrasted if value == CONTRAST else _at
        return lambda y, t: begin(t, y, kinds[value](y).gather(1, t if t.ndim == 2 else t[:, None]).T)
    if callable(value) and target is None:
        return lambda y, _: _everywhere(_computed(value, y).double(), y)
    if callable(value):
        msg = "The start is a function of the whole output; pass it without a target."
        raise RelpropError(msg)
    if not isinstance(value, Tensor):
        lost = hidden and isinstance(value, str) and value in _OF_CLASSES
        there = f" at {layer!r}, which has no classes" if lost else ""
        msg = f"The start {requests.brief(value)} is unknown{there}; pass {', '.join(map(repr, kinds))} or a tensor."
        raise RelpropError(msg)
    if not torch.isfinite(value).all():
        msg = "The start has NaN or infinite values; clean it."
        raise RelpropError(msg)
    shape = tuple(output[:1]) if target is None else tuple(target.shape)
    if tuple(value.shape) == shape and len(output) == 2:
        amounts = value if value.ndim == 2 else value[:, None]
        return lambda y, t: _at(t, y, amounts.T.double().to(y.device))
    if tuple(value.shape) == tuple(output) and target is None:
        return lambda y, _: _everywhere(value.to(y.device).double(), y)
    fitting = f"{shape}" if target is not None else f"{shape} or, for a start at every class, {tuple(output)}"
    if len(output) > 2:
        fitting = f"{tuple(output)}, with no target, for an output with more than one place"
    msg = f"The start has shape {tuple(value.shape)}; it has to be {fitting}."
    raise RelpropError(msg)


def _computed(function: Callable[[Tensor], Any], output: Tensor) -> Tensor:
    """What a user's function makes of the output."""
    value = function(output.clone())
    if not isinstance(value, Tensor) or value.shape != output.shape or not torch.isfinite(value).all():
        got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        msg = f"The start's function gave {got}; it has to give finite relevance of shape {tuple(output.shape)}."
        raise RelpropError(msg)
    return value.detach().to(output.device)


def _probabilities(output: Tensor) -> Tensor:
    return output.double().softmax(1)


def _at(target: Tensor, output: Tensor, amounts: Tensor) -> tuple[Tensor, Tensor]:
    """One at each target, and the amounts as its unit."""
    per_target = target.T if target.ndim == 2 else target[None]
    one = torch.zeros((*per_target.shape, output.shape[1]), dtype=output.dtype, device=output.device)
    return one.scatter_(2, per_target[..., None], 1.0), amounts


def _contrasted(target: Tensor, output: Tensor, amounts: Tensor) -> tuple[Tensor, Tensor]:
    """One at each target and, on top of it, what sets it against the others; the sum is still one.

    ``R_k = p_c (d_kc + beta (d_kc - p_k))``, where ``d_kc - p_k`` is the gradient of ``log p_c`` by the logits and sums
    to zero: the more probable another class is, the more of what speaks for it is taken away.
    """
    one, amounts = _at(target, output, amounts)
    others = _probabilities(output)
    others = others.masked_fill_(others < IMPROBABLE, 0.0).to(one.dtype)
    return one + BETA * (one - others), amounts


def _everywhere(value: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """The user's own relevance of every class, with its largest value as the unit."""
    unit = value.flatten(1).abs().amax(1)
    unit = torch.where(unit > 0, unit, 1.0)
    return (value / unit.reshape(-1, *[1] * (value.ndim - 1)))[None].to(output.dtype), unit[None]


def _at_places(target: Tensor, output: Tensor, amounts: Tensor, *, everywhere: bool) -> tuple[Tensor, Tensor]:
    """The amounts of each target at all places, or at the pixels predicted to be of its class, at all if none is."""
    starts, units = [], []
    for classes in target.T if target.ndim == 2 else target[None]:
        here = output.argmax(1) == classes.reshape(-1, *[1] * (output.ndim - 2))
        none = ~here.flatten(1).any(1) | everywhere
        here = here | none.reshape(-1, *[1] * (here.ndim - 1))
        start = torch.zeros_like(amounts)
        rows = torch.arange(len(output), device=output.device)
        start[rows, classes] = amounts[rows, classes] * here
        one, unit = _everywhere(start, output)
        starts.append(one[0])
        units.append(unit[0])
    return torch.stack(starts), torch.stack(units)
