"""Presets: what each way of propagating gives to every kind of node, a few lines of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relprop.errors import RelpropError
from relprop.merges import RATIO, SIGNED, SYMMETRIC, Split
from relprop.operators import MaxPool
from relprop.rules import Rule, alpha_beta, epsilon, flat, gamma, wplus, zbox, zplus

__all__ = ["FOLD", "HALVES", "PASS", "POOLINGS", "PRESETS", "WINNER", "ZENNIT", "Pooling", "Preset"]


@dataclass(frozen=True)
class Pooling:
    """What stands for a max pool on the way back.

    Attributes:
        name: ``winner`` (takes all, evenly among tied maxima), ``average`` (over the real window), ``average-2x2``
            (the released code's).
        rule: The rule for the averages.
        halves: Whether windows of two by two stand for the real ones.
    """

    name: str
    rule: Rule | None = None
    halves: bool = False

    def __str__(self) -> str:
        """Its name and the rule for the average."""
        return self.name if self.rule is None else f"{self.name}, {self.rule}"

    def check(self, name: str, op: MaxPool, before: Sequence[int], after: Sequence[int]) -> None:
        """Refuses windows that do not give as many outputs as the pool.

        Raises:
            RelpropError: If the shapes do not fit.
        """
        halved = [n // 2 for n in before[-op.pool.axes :]]
        if self.halves and halved != list(after[-op.pool.axes :]):
            msg = (
                f"average-2x2 cannot stand for {name}: windows of two make {halved} of {tuple(before)}, the pool makes "
                f"{tuple(after)}; use preset='paper', or overrides={{{name!r}: 'average'}}."
            )
            raise RelpropError(msg)


WINNER = Pooling("winner")
PASS = "pass"
FOLD = "fold"
HALVES = "halves"
POOLINGS = {p.name: p for p in (WINNER, Pooling("average", zplus()), Pooling("average-2x2", zplus(1e-5), halves=True))}


@dataclass(frozen=True)
class Preset:
    """One line of the table of presets.

    Attributes:
        conv: Rule for convolutions.
        dense: Rule for matrices.
        average: Rule for average pools and means.
        first: Rule for the first linear maps from the input.
        pool: Stand-in for max pools.
        norm: ``"pass"`` or ``"fold"`` for batch norms.
        split: Split at merges.
        upper: Rule for linear maps in the upper half of the blocks and the head; None for the same as below.
        upper_norm: What becomes of batch norms there.
        lower_split: Split at merges in the lower half; None for the same as above.
        head: Rule for the last linear maps with weights, which make the outputs; None for the same as below.
        even: Whether inputs that strided convolutions and pools visit unevenly count alike (:mod:`relprop.tents`).
        start: What the classes of an output start with, unless told; None for the probability.
    """

    conv: Rule
    dense: Rule
    average: Rule
    first: Rule
    pool: Pooling
    norm: str
    split: Split
    upper: Rule | None = None
    upper_norm: str = FOLD
    lower_split: Split | None = None
    head: Rule | None = None
    even: bool = False
    start: str | None = None


_MIXED = epsilon(0.01, relative=True)
_RELEASED = zplus(1e-5)
_AS_RELEASED = Rule("epsilon(+1e-05)", epsilon(bias=False).parts, epsilon=1e-5, unsigned=True, keeps_sign=False)
ZENNIT = epsilon(1e-6)
_NORM = epsilon(1e-6, bias=False)

PRESETS: dict[str, Preset] = {
    "relprop": Preset(
        zplus(),
        zplus(),
        zplus(),
        wplus(),
        POOLINGS["average"],
        PASS,
        RATIO,
        lower_split=SYMMETRIC,
        head=alpha_beta(3, 2),
        even=True,
        start="contrast",
    ),
    "paper": Preset(zplus(), zplus(), zplus(), wplus(), POOLINGS["average"], PASS, RATIO),
    "released": Preset(_RELEASED, _RELEASED, _RELEASED, wplus(1e-5), POOLINGS["average-2x2"], PASS, RATIO),
    "mixture": Preset(zplus(), zplus(), zplus(), wplus(), POOLINGS["average"], PASS, RATIO, upper=_MIXED),
    "released-mixture": Preset(
        _RELEASED,
        _RELEASED,
        _RELEASED,
        wplus(1e-5),
        POOLINGS["average-2x2"],
        PASS,
        RATIO,
        upper=_AS_RELEASED,
        upper_norm=PASS,
    ),
    "epsilon": Preset(ZENNIT, ZENNIT, ZENNIT, ZENNIT, WINNER, FOLD, SIGNED),
    "epsilon-plus-flat": Preset(zplus(1e-6, bias=True), ZENNIT, _NORM, flat(1e-6), WINNER, FOLD, RATIO),
    "epsilon-gamma-box": Preset(gamma(0.25), ZENNIT, _NORM, zbox(epsilon=1e-6), WINNER, FOLD, RATIO),
}
"""Ours, the paper's, the released code's, the appendix' mixture twice, conventional LRP, and zennit's composites."""
