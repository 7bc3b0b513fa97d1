"""Flows: relevance on its way back, with its sums."""

from __future__ import annotations

from torch import Tensor

from relprop import samples
from relprop.dues import Due, memory
from relprop.fused import fits, taken

__all__ = ["Flow"]


class Flow:
    """Relevance on its way, with its sums; its own, if nobody else has a view of the memory it lies in.

    Attributes:
        whole: The relevance, perhaps with a product that is due.
        signed: Whether it may have both signs.
        own: Whether its memory is nobody else's.
    """

    def __init__(
        self,
        whole: Tensor | Due,
        signed: bool,
        lead: int | None,
        batch: int,
        amount: Tensor | None = None,
        size: Tensor | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.whole, self.signed, self._batch = whole, signed, batch
        self.own = own and 0 not in self.memory.stride()
        self._due = whole if isinstance(whole, Due) else None
        self._beside: tuple[Tensor, Tensor] | None = None
        if self._due is None:
            relevance = self.relevance
            if signed and (amount is None or size is None):
                amount, size = samples.measured(relevance, lead, batch)
            amount = samples.summed(relevance, lead, batch) if amount is None else amount
            self._beside = amount, size if signed and size is not None else amount

    @property
    def memory(self) -> Tensor:
        """What it lies in."""
        return memory(self.whole)

    @property
    def relevance(self) -> Tensor:
        """It, with the product taken."""
        self.settle()
        return self.memory

    @property
    def sums(self) -> tuple[Tensor, Tensor] | None:
        """Its sum and that of its magnitudes, ``(T, B)``; None while a product is due."""
        if self._due is None:
            return self._beside
        if self._due.sums is None:
            return None
        amount, size = (samples.gathered(of, self._batch) for of in self._due.sums)
        size = size if self.signed else amount
        return (amount, size) if self._beside is None else (self._beside[0] + amount, self._beside[1] + size)

    def settle(self) -> None:
        """Takes a product that is due."""
        self.whole = taken(self.whole)

    def joined(self, other: Flow) -> Flow:
        """The sum of two flows; written over one of them if that is nobody else's."""
        both = object.__new__(Flow)
        both.signed, both.own, both._batch, both._due = self.signed, True, self._batch, None
        last, first = (self, other) if isinstance(self.whole, Due) else (other, self)
        first.settle()
        if isinstance(last.whole, Due) and last.whole.r is None and fits(last.whole.a, first.memory[0], r=first.memory):
            last.whole.r = first.memory
            both.whole = both._due = last.whole
            both._beside = first.sums
            return both
        last.settle()
        one, two = (other, self) if other.own else (self, other)
        both.whole = one.memory.add_(two.memory) if one.own else one.memory + two.memory
        mine, others = self.sums, other.sums
        assert mine is not None
        assert others is not None
        both._beside = mine[0] + others[0], mine[1] + others[1]
        return both
