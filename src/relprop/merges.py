"""Splits: how a sum hands relevance to its branches.

Where a skip connection meets its residual block, ``h = h_s + h_m``, relevance has to be parted between the two. A
split says which share each branch gets, element by element; shares that sum to one conserve relevance. Ablation is a
loop over these.

References:
    Otsuki et al., 2024: Layer-Wise Relevance Propagation with Conservation Property for ResNet, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.ledger import total
from relprop.rules import Handed, tiny

Shares = Callable[[tuple[Tensor, ...]], Sequence[Tensor | float]]
"""From a sum's branches, each with a batch axis, to the share that each of them gets."""


@dataclass(frozen=True)
class Split:
    """A way to part relevance at a sum.

    Attributes:
        name: How it prints.
        shares: The share of every branch; None for equal shares.
        weighs: Whether it looks at the branches' values.
        stabilised: Whether what the shares lack is epsilon's, by design.
        conserves: Whether the split promises to lose nothing.
        keeps_sign: Whether relevance that is nowhere negative stays so.
    """

    name: str
    shares: Shares | None
    weighs: bool = True
    stabilised: bool = False
    conserves: bool = True
    keeps_sign: bool = True

    def __str__(self) -> str:
        """The name."""
        return self.name

    def __call__(
        self, branches: tuple[Tensor, ...], count: int, r: Tensor, *, main: int, closed: frozenset[int]
    ) -> Handed:
        """Hands the relevance of a sum to its branches.

        Args:
            branches: What was added, each broadcast to the sum's shape; may be empty where nobody weighs them.
            count: The number of branches.
            r: Relevance of the sum, ``(T, B, ...)``.
            main: Which branch is the residual block's.
            closed: Branches that get nothing (identity skips that are left out).

        Returns:
            Relevance of each branch, and what was absorbed.

        Raises:
            RelpropError: If a split of the user's does not give one share a branch.
        """
        takers = [main] if self is MAIN_ONLY else [i for i in range(count) if i not in closed]
        handed: list[Tensor | None] = [None] * count
        if len(takers) == 1:
            handed[takers[0]] = r
            return Handed(tuple(handed), {})
        shares = self.shares(tuple(branches[i] for i in takers)) if self.shares else [1 / len(takers)] * len(takers)
        if len(shares) != len(takers):
            msg = (
                f"The split {self.name} gave {len(shares)} shares for {len(takers)} branches; it has to give one "
                "for each."
            )
            raise RelpropError(msg)
        for i, share in zip(takers, shares, strict=True):
            handed[i] = r * share
        absorbed = {}
        if self.stabilised:
            absorbed["epsilon"] = total(r - r * sum(shares[1:], start=torch.as_tensor(shares[0])))
        return Handed(tuple(handed), absorbed)


def _by_magnitude(branches: tuple[Tensor, ...]) -> Sequence[Tensor | float]:
    sizes = [h.abs() for h in branches]
    whole = sum(sizes[1:], start=sizes[0])
    if whole.amin() > tiny(whole.dtype):
        return [size / whole for size in sizes]
    nothing = whole <= tiny(whole.dtype)
    whole = whole.masked_fill(nothing, 1.0)
    return [torch.where(nothing, 1 / len(sizes), size / whole) for size in sizes]


def _by_value(branches: tuple[Tensor, ...]) -> Sequence[Tensor | float]:
    whole = sum(branches[1:], start=branches[0])
    whole = whole + torch.where(whole < 0, -1e-6, 1e-6).to(whole.dtype)
    return [h / whole for h in branches]


SYMMETRIC = Split("symmetric", None, weighs=False)
"""Halves (Otsuki et al., 2024, eq. 4); with n branches, a share of 1/n for each."""

RATIO = Split("ratio", _by_magnitude)
"""By magnitude, ``|h_s| / (|h_s| + |h_m|)`` (Otsuki et al., 2024, eq. 5); 0/0 halves."""

SIGNED = Split("signed", _by_value, stabilised=True, conserves=False, keeps_sign=False)
"""By value, ``h_s / (h_s + h_m + eps)``: the epsilon rule on the sum; denominators may cancel."""

MAIN_ONLY = Split("main-only", None, weighs=False)
"""Everything to the residual block."""

NAMES = {split.name: split for split in (SYMMETRIC, RATIO, SIGNED, MAIN_ONLY)}


def split(value: str | Split | Shares) -> Split:
    """Finds a split by name, or makes one of a function.

    Args:
        value: A name, a split, or a function from the branches to their shares.

    Raises:
        RelpropError: If it is none of these.
    """
    if isinstance(value, Split):
        return value
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    if callable(value):
        # Nothing is known of a function: its shares may be negative and need not sum to one. The ledger tells.
        return Split(getattr(value, "__name__", "custom"), value, conserves=False, keeps_sign=False)
    msg = f"There is no split {value!r}; there are {', '.join(NAMES)}, or a function from the branches to their shares."
    raise RelpropError(msg)
