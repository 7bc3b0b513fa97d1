"""Precision: what convolutions multiply with, where a user asks for less than float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

from relprop.errors import RelpropError

__all__ = ["Autocast", "multiplied", "precision", "shortened"]

Autocast = Literal["bfloat16", "tf32"]

_SHORT: ContextVar[torch.dtype | None] = ContextVar("short", default=None)


@contextmanager
def precision(device: torch.device, autocast: Autocast | None = None) -> Iterator[None]:
    """Sets what convolutions multiply with, and puts everything back.

    Relevance does not add up in the shortened float32 (TF32) that CUDA may multiply with, so it is off unless asked
    for. Divisions, splits and sums stay in float32 in any case.

    Args:
        device: Where it is computed.
        autocast: None for the tensors' own precision.

    Raises:
        RelpropError: If the name is unknown.
    """
    if autocast not in (None, "bfloat16", "tf32"):
        raise RelpropError(f"The autocast {autocast!r} is unknown; pass 'bfloat16', 'tf32' or None.")
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolutions.allow_tf32
    token = _SHORT.set(torch.bfloat16 if autocast == "bfloat16" else None)
    try:
        if device.type == "cuda":
            matmul.allow_tf32 = convolutions.allow_tf32 = autocast == "tf32"
        yield
    finally:
        _SHORT.reset(token)
        if device.type == "cuda":
            matmul.allow_tf32, convolutions.allow_tf32 = before


def shortened(a: Tensor) -> bool:
    """Whether a product with such a tensor is to be computed in fewer digits."""
    return _SHORT.get() is not None and a.dtype == torch.float32


def multiplied(product: Callable[..., Tensor], *factors: Tensor | None) -> Tensor:
    """A product of tensors, rounded first where that was asked for.

    A processor's own bfloat16 is not relied on, because some announce what they cannot do and end the process: there
    the rounded factors are multiplied in float32, which shows what is lost but gains no time.
    """
    first, dtype = factors[0], _SHORT.get()
    if dtype is None or first is None or not shortened(first):
        return product(*factors)
    rounded = [None if factor is None else factor.to(dtype) for factor in factors]
    if first.device.type == "cpu":
        return product(*(None if factor is None else factor.float() for factor in rounded))
    return product(*rounded).float()
