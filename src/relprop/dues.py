"""Dues: products of relevance that are taken in the pass over memory that needs them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Due", "memory"]


@dataclass(eq=False)
class Due:
    """Relevance ``r + c a`` whose product has not been taken yet.

    Whoever divides or splits it takes the product on the way; :func:`relprop.fused.taken` does nothing else.

    Attributes:
        c: Memory of its own, which results may be written to, ``(T, B, ...)``.
        a: The factor, ``(B, ...)``; nobody may write to it before.
        r: What is added to the product, or None.
        sums: Those of the product and of its magnitudes, ``(T, B)`` each; None until it is taken.
    """

    c: Tensor
    a: Tensor
    r: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None


def memory(r: Tensor | Due) -> Tensor:
    """What relevance lies in, whether or not a product of it is due."""
    return r.c if isinstance(r, Due) else r
