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
from relprop.rules import Handed
from relprop.tiles import tiles
from relprop.transforms import over, tiny

Shares = Callable[[tuple[Tensor, ...]], Sequence[Tensor | float]]
"""A user's own split: from a sum's branches, each with a batch axis, to the share that each of them gets."""


@dataclass(frozen=True)
class Split:
    """A way to part relevance at a sum.

    Attributes:
        name: How it prints.
        weights: Relevance goes to the branches in proportion to this function of them; None for equal parts.
        shares: A user's own function from the branches to their shares, instead.
        epsilon: Stabiliser of the weights' sum; None if it cannot cancel.
        main_only: Whether the residual block takes all.
    """

    name: str
    weights: Callable[[Tensor], Tensor] | None = None
    shares: Shares | None = None
    epsilon: float | None = None
    main_only: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def weighs(self) -> bool:
        """Whether it looks at the branches' values."""
        return self.weights is not None or self.shares is not None

    @property
    def _by_magnitude(self) -> bool:
        return self.weights is torch.abs

    @property
    def keeps_sign(self) -> bool:
        """Whether relevance that is nowhere negative stays so; of a user's function, nothing is known."""
        return self.shares is None and self.epsilon is None

    def takers(self, count: int, main: int, closed: frozenset[int]) -> list[int]:
        """The branches that get something.

        Args:
            count: The number of branches.
            main: Which of them is the residual block's.
            closed: Identity skips that are left out.
        """
        return [main] if self.main_only else [i for i in range(count) if i not in closed]

    def __call__(self, branches: Sequence[Tensor], count: int, r: Tensor, nonnegative: Sequence[bool] = ()) -> Handed:
        """Hands the relevance of a sum to those of its branches that get something.

        Args:
            branches: Their values, broadcast to the sum's shape; may be empty where nobody weighs them.
            count: Their number.
            r: Relevance of the sum, ``(T, B, ...)``.
            nonnegative: Which of them are known to have no negative values.

        Returns:
            Relevance of each of them, and what was absorbed.

        Raises:
            RelpropError: If a split of the user's does not give one share a branch.
        """
        if count == 1:
            return Handed((r,), {})
        if self._by_magnitude and count == 2 and len(r) == 1:
            return Handed(_halves(*branches, r[0]), {})
        if self.weights is not None:
            # The magnitude of what is not negative is itself, and not ours to write over.
            own = [not self._by_magnitude or not known for known in nonnegative or [False] * count]
            weights = [self.weights(h) if mine else h for h, mine in zip(branches, own, strict=True)]
            return self._in_proportion(weights, r, own)
        shares = self.shares(tuple(branches)) if self.shares else [1 / count] * count
        if not isinstance(shares, Sequence) or len(shares) != count:
            msg = f"The split {self.name} has to give a list or tuple of {count} shares, one for each branch."
            raise RelpropError(msg)
        return Handed(tuple(r * share for share in shares), {})

    def _in_proportion(self, weights: Sequence[Tensor], r: Tensor, own: Sequence[bool]) -> Handed:
        """``R_b = w_b / (sum w + eps) R``; where all weights are zero, equal parts."""
        whole = _sum(weights)
        absorbed = {}
        nothing = None
        if self.epsilon is not None:
            eps = torch.where(whole < 0, -1.0, 1.0).to(whole.dtype) * self.epsilon
            whole = whole + eps
            absorbed["epsilon"] = total(r / whole * eps)
        elif whole.amin() <= tiny(whole.dtype):
            nothing = whole <= tiny(whole.dtype)
            whole.masked_fill_(nothing, torch.inf)
        part = over(r, whole)
        single = len(part) == 1 and self._by_magnitude
        handed = [
            w.mul_(part[0])[None] if mine and single else part * w for w, mine in zip(weights[:-1], own, strict=False)
        ]
        handed.append(part.mul_(weights[-1]))
        if nothing is not None:
            even = r * nothing / len(weights)
            handed = [h + even for h in handed]
        return Handed(tuple(handed), absorbed)


def _halves(one: Tensor, other: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """What two branches get in proportion to their magnitudes; 0/0 halves. What one does not get, the other does."""
    mine, rest = torch.empty_like(r), torch.empty_like(r)
    for a, b, whole, x, y in tiles(one, other, r, mine, rest):
        torch.abs(a, out=x)
        torch.abs(b, out=y).add_(x)
        x.div_(y).nan_to_num_(0.5).mul_(whole)
        torch.sub(whole, x, out=y)
    return mine[None], rest[None]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    result = tensors[0] + tensors[1]
    for t in tensors[2:]:
        result += t
    return result


def _itself(h: Tensor) -> Tensor:
    return h


SYMMETRIC = Split("symmetric")
"""Halves (Otsuki et al., 2024, eq. 4); with n branches, a share of 1/n for each."""

RATIO = Split("ratio", torch.abs)
"""By magnitude, ``|h_s| / (|h_s| + |h_m|)`` (Otsuki et al., 2024, eq. 5); 0/0 halves."""

SIGNED = Split("signed", _itself, epsilon=1e-6)
"""By value, ``h_s / (h_s + h_m + eps)``: the epsilon rule on the sum; denominators may cancel."""

MAIN_ONLY = Split("main-only", main_only=True)
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
        return Split(getattr(value, "__name__", "custom"), shares=value)
    msg = f"There is no split {value!r}; there are {', '.join(NAMES)}, or a function from the branches to their shares."
    raise RelpropError(msg)
