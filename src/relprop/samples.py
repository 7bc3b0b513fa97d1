"""Samples: where the samples of a batch lie in a node's value.

Most values have them along the first axis. Attention in windows makes many short sequences of each, and attention of
several heads may put them second. In memory order, a value is always ``(lead, batch, rest)``: ``lead`` says it all, and
is followed through the graph with numbers of samples in place of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from relprop.ledger import total, totals
from relprop.operators import Operator

_FIRST = 2.0**40

APART = 1
"""The lead of a value whose samples lie along the first axis, each perhaps as several items."""


def lead(op: Operator, values: Sequence[Any], leads: Sequence[int | None], after: Any, batch: int) -> int | None:
    """How often the samples repeat in a node's value, in memory order.

    Args:
        op: The operator.
        values: Its inputs, without contents.
        leads: Their leads.
        after: Its value, without contents.
        batch: The number of samples.

    Returns:
        The lead, or None where samples are mixed, or there are none.
    """
    if not isinstance(after, Tensor):
        return None
    if batch == 1:
        return APART
    if any(
        leads[k] is not None for k in op.heirs
    ):  # where what gets relevance lies; what makes a gate may lie elsewhere
        leads = [known if k in op.heirs else None for k, known in enumerate(leads)]
    numbers = [
        _numbers(v, known, batch) if isinstance(v, Tensor) else v for v, known in zip(values, leads, strict=True)
    ]
    if all(known is None for known in leads):
        return None
    try:
        found = op.probe(*numbers)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    if found.shape != after.shape:  # an operator that keeps the order of the samples, whatever else it does
        return next((known for known in leads if known is not None and after.numel() % (known * batch) == 0), None)
    return next((k for k in _candidates(found.shape, batch) if _fits(found, k, batch)), None)


def _numbers(value: Tensor, known: int | None, batch: int) -> Tensor:
    """The number of its sample for every element; NaN for a constant's."""
    if known is None:
        return torch.full(value.shape, torch.nan, dtype=torch.float64)
    return _called(batch).expand(known, batch, value.numel() // (known * batch)).reshape(value.shape)


def _candidates(shape: Sequence[int], batch: int) -> Iterator[int]:
    for axis, size in enumerate(shape):
        if size % batch == 0:
            yield from (prod(shape[:axis]) * k for k in range(1, size // batch + 1) if (size // batch) % k == 0)


def _fits(found: Tensor, k: int, batch: int) -> bool:
    numbers = found.reshape(k, batch, -1)
    constant = ~((numbers >= _FIRST) & (numbers < _FIRST + batch))
    return bool((constant | (numbers == _called(batch))).all())


def _called(batch: int) -> Tensor:
    """What the samples are called: numbers that no constant in between has."""
    return torch.arange(batch, dtype=torch.float64).reshape(1, batch, 1) + _FIRST


def summed(r: Tensor, known: int | None, batch: int) -> Tensor:
    """Sums relevance ``(T, ...)`` to ``(T, batch)``."""
    return gathered(total(_arranged(r, known, batch)), batch)


def measured(r: Tensor, known: int | None, batch: int) -> tuple[Tensor, Tensor]:
    """Sums relevance ``(T, ...)``, and its magnitudes, to ``(T, batch)``."""
    amounts, sizes = totals(_arranged(r, known, batch))
    return gathered(amounts, batch), gathered(sizes, batch)


def gathered(amounts: Tensor, batch: int) -> Tensor:
    """Sums amounts ``(T, items)`` over the items of each sample."""
    return amounts if amounts.shape[1] == batch else amounts.reshape(len(amounts), batch, -1).sum(2)


def _arranged(r: Tensor, known: int | None, batch: int) -> Tensor:
    """Relevance with the samples, or their items, behind the targets."""
    in_order = are_first(known, r.shape[1:], batch)
    return r if in_order else r.reshape(len(r), known or APART, batch, -1).transpose(1, 2)


def are_first(known: int | None, shape: Sequence[int], batch: int) -> bool:
    """Whether the first axis is that of the samples, or of several items of each."""
    return known in (None, APART) and shape[0] % batch == 0


def in_front(value: Tensor, known: int, batch: int) -> Tensor:
    """A value ``(...)`` as ``(batch, lead, rest, last)``: samples in front, the last axis as it was."""
    return value.reshape(known, batch, -1, value.shape[-1]).transpose(0, 1)


def as_before(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Takes :func:`in_front` back, for relevance ``(T, batch, lead, rest, last)``."""
    return value.transpose(1, 2).reshape(len(value), *shape)
