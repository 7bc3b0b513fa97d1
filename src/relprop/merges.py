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
from typing import Any

import torch
from torch import Tensor

from relprop import fused
from relprop.dues import Due, memory
from relprop.errors import RelpropError
from relprop.ledger import total
from relprop.rules import Handed
from relprop.tiles import tileable, tiles
from relprop.transforms import tiny

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
    def keeps_sign(self) -> bool:
        """Whether relevance that is nowhere negative stays so; of a user's function, nothing is known."""
        return self.shares is None and self.epsilon is None

    @property
    def skips_zeros(self) -> bool:
        """Whether a branch of zero gets nothing, as long as there are others."""
        return self.weights is _itself and self.epsilon is not None

    def takers(self, count: int, main: int, closed: frozenset[int]) -> list[int]:
        """The branches that get something.

        Args:
            count: The number of branches.
            main: Which of them is the residual block's.
            closed: Identity skips that are left out.
        """
        return [main] if self.main_only else [i for i in range(count) if i not in closed]

    def __call__(
        self,
        branches: Sequence[Tensor],
        count: int,
        r: Tensor | Due,
        nonnegative: Sequence[bool] = (),
        spare: Sequence[bool] = (),
        signed: bool = False,
    ) -> Handed:
        """Hands the relevance of a sum to those of its branches that get something.

        Args:
            branches: Their values, broadcast to the sum's shape; may be empty where nobody weighs them.
            count: Their number.
            r: Relevance of the sum, ``(T, B, ...)``.
            nonnegative: Which of them are known to have no negative values.
            spare: Which of them, and then whether ``r``, nobody needs after: they may be written over.
            signed: Whether ``r`` may have both signs.

        Returns:
            Relevance of each of them, and what was absorbed.

        Raises:
            RelpropError: If a split of the user's does not give one share a branch.
        """
        if count == 1:
            return Handed((fused.taken(r),), {})
        by_size = self.weights is torch.abs and self.epsilon is None
        if count == 2 and (by_size or self.skips_zeros):
            compiled = fused.fits(*branches, r=r)
            r = r if compiled else fused.taken(r)
            if compiled or (len(memory(r)) == 1 and tileable(*branches, memory(r)[0])):
                spare = spare or [False] * 3
                if by_size:
                    return _by_magnitude(branches, r, nonnegative or [False, False], spare, signed, compiled)
                return _by_value(branches, r, self.epsilon or 0.0, spare, compiled)
        r = fused.taken(r)
        if self.weights is not None:
            return self._in_proportion([self.weights(h) for h in branches], r)
        if self.shares is None:  # equal parts: one will do for all
            part = r.div_(count).view_as(r) if spare and spare[-1] else r / count
            return Handed((part,) * count, {})
        shares = self.shares(tuple(branches))
        if not isinstance(shares, Sequence) or len(shares) != count:
            msg = f"The split {self.name} has to give a list or tuple of {count} shares, one for each branch."
            raise RelpropError(msg)
        for share in shares:
            _check_share(share, r.shape[1:], self.name)
        return Handed(tuple(r * share for share in shares), {})

    def _in_proportion(self, weights: Sequence[Tensor], r: Tensor) -> Handed:
        """``R_b = w_b / (sum w + eps) R``; where all weights are zero, equal parts."""
        whole = sum(weights[1:], weights[0])
        absorbed = {}
        if self.epsilon is not None:
            eps = torch.where(whole < 0, -1.0, 1.0).to(whole.dtype) * self.epsilon
            whole = whole + eps
            absorbed["epsilon"] = total(r / whole * eps)
            return Handed(tuple(r * (w / whole) for w in weights), absorbed)
        nothing = whole <= tiny(whole.dtype)
        whole.masked_fill_(nothing, torch.inf)
        shares = [torch.where(nothing, 1 / len(weights), w / whole) for w in weights[:-1]]
        handed = [r * share for share in shares]
        rest = r - handed[0]
        for h in handed[1:]:
            rest -= h
        return Handed((*handed, rest), absorbed)


def _check_share(share: Any, shape: torch.Size, name: str) -> None:
    """Refuses what relevance of a shape cannot be multiplied with, or would grow by."""
    try:
        fits = isinstance(share, int | float) or torch.broadcast_shapes(share.shape, shape) == shape
    except (AttributeError, RuntimeError):
        fits = False
    if not fits:
        what = f"of shape {tuple(share.shape)}" if isinstance(share, Tensor) else f"a {type(share).__name__}"
        msg = f"A share of the split {name} is {what}; it has to be a number, or a tensor that fits {tuple(shape)}."
        raise RelpropError(msg)


def _by_magnitude(
    branches: Sequence[Tensor],
    r: Tensor | Due,
    nonnegative: Sequence[bool],
    spare: Sequence[bool],
    signed: bool,
    compiled: bool,
) -> Handed:
    """Parts relevance between two branches by magnitude, in one pass over memory or piece by piece; 0/0 halves.

    What the one does not get, the other does. Sums are taken while a piece is at hand.
    """
    last = 0 if spare[0] and not spare[1] else 1  # the one that may be written over
    one, other = branches[1 - last], branches[last]
    whole = memory(r)
    mine = other[None] if spare[last] and len(whole) == 1 else torch.empty_like(whole)
    rest = whole if spare[2] else torch.empty_like(whole)
    if compiled:
        x, y, *sizes = fused.split_by_magnitude(one, other, r, mine, rest)
    else:
        x, y, *sizes = _magnitudes_in_pieces(one, other, whole[0], mine[0], rest[0], nonnegative[1 - last], signed)
    order = 1 if last else -1
    return Handed((mine, rest)[::order], {}, (x, y)[::order], tuple(sizes)[::order] if signed else ())


def _magnitudes_in_pieces(
    one: Tensor, other: Tensor, r: Tensor, mine: Tensor, rest: Tensor, nonnegative: bool, signed: bool
) -> Tensor:
    sums = [[0.0] * len(r) for _ in range(4)]
    for sample, (a, b, whole, x, y) in tiles(one, other, r, mine, rest):
        weight = a if nonnegative else a.abs()
        torch.abs(b, out=x).add_(weight)
        torch.div(weight, x, out=x).nan_to_num_(0.5).mul_(whole)
        torch.sub(whole, x, out=y)
        for k, share in enumerate((x, y)):
            sums[k][sample] += share.sum().item()
            sums[2 + k][sample] += share.abs().sum().item() if signed else 0.0
    return torch.tensor(sums, dtype=torch.float64).unsqueeze(1)


def _by_value(
    branches: Sequence[Tensor], r: Tensor | Due, epsilon: float, spare: Sequence[bool], compiled: bool
) -> Handed:
    """Parts relevance between two branches by value, likewise, and names what the stabiliser takes."""
    one, other = branches
    whole = memory(r)
    over = [h[None] for h, known in zip(branches, spare, strict=False) if known and len(whole) == 1]
    over += [whole] if spare[2] else []
    mine, rest = (over + [torch.empty_like(whole) for _ in branches])[:2]
    if compiled:
        x, y, *sizes, taken = fused.split_by_value(one, other, r, mine, rest, epsilon)
    else:
        x, y, *sizes, taken = _values_in_pieces(one, other, whole[0], mine[0], rest[0], epsilon)
    return Handed((mine, rest), {"epsilon": taken}, (x, y), tuple(sizes))


def _values_in_pieces(one: Tensor, other: Tensor, r: Tensor, mine: Tensor, rest: Tensor, epsilon: float) -> Tensor:
    sums = [[0.0] * len(r) for _ in range(5)]
    eps = r.new_full((), epsilon)
    for sample, (a, b, whole, x, y) in tiles(one, other, r, mine, rest):
        part = a + b
        signed = torch.copysign(eps, part)
        torch.div(whole, part.add_(signed), out=part)
        for k, share in enumerate((torch.mul(a, part, out=x), torch.mul(b, part, out=y))):
            sums[k][sample] += share.sum().item()
            sums[2 + k][sample] += share.abs().sum().item()
        sums[4][sample] += signed.mul_(part).sum().item()
    return torch.tensor(sums, dtype=torch.float64).unsqueeze(1)


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
