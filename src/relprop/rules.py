"""Rules: how a linear map hands relevance to its inputs.

Every rule is a set of contributions ``z_ji`` of input ``i`` to output ``j``, each a sum of terms (some function of
the input) x (some function of the weight), and hands on

    R_i = sum_j  z_ji / (sum_k z_jk + b_j + eps_j) R_j                                    (Bach et al., 2015, eq. 56)

They differ in the terms, in whether the bias ``b_j`` takes a share, and in what stabilises the denominator:

- ``epsilon`` given: ``eps_j = epsilon sign(z_j)``. What it takes is absorbed, and named.
- not given: the denominator stands as it is, and an output whose contributions are all zero hands its relevance
  evenly to the inputs it really has. Such a rule loses nothing.

References:
    Bach et al., 2015: On Pixel-Wise Explanations for Non-Linear Classifier Decisions by LRP.
    Montavon et al., 2017: Explaining NonLinear Classification Decisions with Deep Taylor Decomposition.
    Montavon et al., 2019: Layer-Wise Relevance Propagation: An Overview.
    Lapuschkin et al., 2019: Unmasking Clever Hans Predictors and Assessing What Machines Really Learn.
    Andeol et al., 2021: Learning Domain Invariant Representations by Joint Wasserstein Distance Minimization.
    Otsuki et al., 2024: Layer-Wise Relevance Propagation with Conservation Property for ResNet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from relprop.divisions import divide, note, per_target, shared, shares, steadied
from relprop.dues import Due
from relprop.errors import RelpropError
from relprop.fused import taken
from relprop.ledger import total
from relprop.maps import LinearMap, Transform
from relprop.tents import tented
from relprop.transforms import Above, Boosted, negative, one_sample, positive, same, square, tiny

IMAGENET_LOW = (-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225)
IMAGENET_HIGH = (0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225)
"""Black and white after the normalisation that ImageNet models expect."""


# -- a rule --


class Term(NamedTuple):
    """One product: contributions ``weight(w_ji) input(a_i)``."""

    input: Transform
    weight: Transform


@dataclass(frozen=True)
class Part:
    """Contributions that share a denominator.

    Attributes:
        terms: Their products; none where every input that an output really has contributes one.
        share: How much of the relevance goes this way (alpha, or minus beta).
        bias: What of the bias stands in the denominator; None for nothing.
        sign: 1 or -1 where only outputs of that sign take part; 0 for all.
    """

    terms: tuple[Term, ...]
    share: float = 1.0
    bias: Transform | None = None
    sign: int = 0


class Handed(NamedTuple):
    """What a node handed on.

    Attributes:
        relevance: Relevance of each input, ``(T, B, ...)``; None for inputs that get nothing.
        absorbed: What stayed behind, ``(T, B)``, by cause.
        amounts: The sums of what each input gets, ``(T, B)``, where they are known already.
        sizes: The sums of its magnitudes, likewise.
        factor: What the relevance of the one input that gets some is yet to be multiplied with, or None.
    """

    relevance: tuple[Tensor | None, ...]
    absorbed: dict[str, Tensor]
    amounts: tuple[Tensor | None, ...] = ()
    sizes: tuple[Tensor | None, ...] = ()
    factor: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """A way to hand relevance through a linear map.

    Attributes:
        name: How it prints, parameters included.
        parts: Its contributions.
        epsilon: Stabiliser, or None for the exact form.
        relative: Whether epsilon counts in units of the root mean square of the sample's outputs.
        unsigned: Whether epsilon is added as it is, instead of with the denominator's sign.
        keeps_sign: Whether relevance that is nowhere negative stays so.
        even: Whether inputs that a stride visits unevenly count alike (:mod:`relprop.tents`).
    """

    name: str
    parts: tuple[Part, ...]
    epsilon: float | None = None
    relative: bool = False
    unsigned: bool = False
    keeps_sign: bool = True
    even: bool = False

    def __str__(self) -> str:
        """The name."""
        return self.name

    def needs_input(self) -> bool:
        """Whether the values of the input matter, not only its shape."""
        return any(term.input is not one_sample for part in self.parts for term in part.terms)

    def check(self, a: Tensor) -> None:
        """Refuses an input that the rule's bounds do not fit; its values do not matter.

        Raises:
            RelpropError: If the number of channels is another.
        """
        for term in (term for part in self.parts for term in part.terms if isinstance(term.input, Above)):
            term.input(a)

    @property
    def divides_output(self) -> bool:
        """Whether what it divides by, up to the stabiliser, is the map's own output, bias and all."""
        part = self.parts[0]
        own = part.terms == (Term(same, same),) and part.bias is same and not part.sign
        return own and len(self.parts) == 1 and not self.even

    @property
    def skips_zeros(self) -> bool:
        """Whether an input of zero gets nothing."""
        scaled = all(t.input in (same, positive, negative) for part in self.parts for t in part.terms)
        return scaled and self.epsilon is not None and all(part.terms for part in self.parts)

    def __call__(
        self,
        linear: LinearMap,
        a: Tensor,
        r: Tensor | Due,
        *,
        nonnegative: bool = False,
        y: Tensor | None = None,
        due: bool = False,
    ) -> Handed:
        """Hands the relevance of a map's output to its input.

        Args:
            linear: The map.
            a: Its input, ``(B, *shape)``.
            r: Relevance of its output, ``(T, B, ...)``: T targets of each sample.
            nonnegative: Whether the input is known to have no negative values, which saves half of the terms.
            y: The map's output, where the rule divides by it and it is at hand; written over.
            due: Whether the last product may be left to whoever needs it.

        Returns:
            Relevance of the input, and what was absorbed.
        """
        shape = a.shape[1:]
        linear = tented(linear, shape) if self.even else linear
        r = r if len(self.parts) == 1 else taken(r)
        result: Tensor | Due | None = None
        absorbed: dict[str, Tensor] = {}
        for part in self.parts:
            terms = [t for t in part.terms if not (nonnegative and t.input is negative)]
            live = [a if nonnegative and t.input is positive else t.input(a) for t in terms]
            if y is None:
                denominators = [
                    linear.weighed(shape, term.weight) if term.input is one_sample else linear.sums(x, term.weight)
                    for term, x in zip(terms, live, strict=True)
                ]
                z = sum(denominators[1:], denominators[0]) if denominators else linear.fan(shape)
            else:
                z = y
            flow = r if part.share == 1 else taken(r) * part.share
            if part.sign:
                flow, dropped = self._outputs_of(part.sign, linear, a, taken(flow))
                note(absorbed, "epsilon", dropped)
            if self.epsilon is None:
                s, even = divide(linear, flow, z, shape, absorbed)
            else:
                bias = None if part.bias is None or linear.bias is None else part.bias(linear.bias)
                z = z if bias is None or y is not None else z + bias
                s, even = self._stabilise(flow, z, bias, absorbed), None
            if not terms:
                result = per_target(linear.spread, s, shape)
            for term, x in zip(terms, live, strict=True):
                share = shares(linear, s, term.weight, shape, None if term.input is one_sample else x)
                result = share if result is None else taken(result) + taken(share)
            if even is not None and result is not None:
                result = taken(result)
                result = result + even if 0 in result.stride() else result.add_(even)
        if isinstance(result, Due) and due:
            return Handed((result.c,), absorbed, factor=result.a)
        return Handed((None if result is None else taken(result),), absorbed)

    def _stabilise(self, r: Tensor | Due, z: Tensor, bias: Tensor | None, absorbed: dict[str, Tensor]) -> Tensor:
        """Divides by ``z + eps sign(z)``, with the bias in ``z``, and names what the two take."""
        eps = torch.full((), self.epsilon or 0.0, dtype=z.dtype, device=z.device)
        if self.relative:
            rms = z.flatten(1).square().mean(1).sqrt()
            eps = (eps * rms).clamp(min=tiny(z.dtype)).reshape(-1, *[1] * (z.ndim - 1))
        if self.unsigned:
            eps = torch.where(z + eps == 0, -eps, eps)
            s = taken(r) / (z + eps)
            kept, biased = total(s * eps), None if bias is None else shared(s, bias)
        else:
            s, kept, biased = steadied(r, z, eps, bias)
        note(absorbed, "epsilon", kept)
        note(absorbed, "bias", biased)
        return s

    @staticmethod
    def _outputs_of(sign: int, linear: LinearMap, a: Tensor, r: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keeps the relevance of outputs of one sign; that of an output of zero counts as epsilon's."""
        y = linear(a)
        kept = r * (y > 0 if sign > 0 else y < 0)
        return kept, total(r * (y == 0)) if sign > 0 else None


# -- the rules by name --

_EXCITE = (Term(positive, positive), Term(negative, negative))
_INHIBIT = (Term(positive, negative), Term(negative, positive))


def epsilon(value: float = 1e-6, *, relative: bool = False, bias: bool = True) -> Rule:
    """LRP-epsilon: ``z_ji = w_ji a_i``, biases take their share (Bach et al., 2015, eq. 58).

    Args:
        value: The stabiliser.
        relative: Count it in units of the root mean square of the sample's outputs (Montavon et al., 2019, section
            10.3).
        bias: Whether biases take a share.
    """
    part = Part((Term(same, same),), bias=same if bias else None)
    name = f"epsilon({value:g}{' rms' if relative else ''})"
    return Rule(name, (part,), epsilon=value, relative=relative, keeps_sign=False)


def zplus(epsilon: float | None = None, *, bias: bool = False) -> Rule:
    """z+ = alpha1-beta0: ``z_ji = max(0, w_ji a_i)`` (Montavon et al., 2017, eq. 12; Otsuki et al., 2024, eq. 2).

    The paper's formula where inputs are not negative, still bounded and conserving where they are.

    Args:
        epsilon: Stabiliser; None for the exact form.
        bias: Whether positive biases take a share; needs a stabiliser.
    """
    return _excitation("z+", Part(_EXCITE), epsilon, bias)


def wplus(epsilon: float | None = None) -> Rule:
    """w+: ``z_ji = max(0, w_ji)``, the input taken as ones: the first layer of Otsuki et al. (2024), as released."""
    return _excitation("w+", Part((Term(one_sample, positive),)), epsilon, bias=False)


def flat(epsilon: float | None = None) -> Rule:
    """Flat: ``z_ji = 1`` for every input that an output sees (Lapuschkin et al., 2019)."""
    return _excitation("flat", Part(()), epsilon, bias=False)


def w2(epsilon: float | None = None) -> Rule:
    """w-squared: ``z_ji = w_ji^2`` (Montavon et al., 2017, eq. 9)."""
    return _excitation("w2", Part((Term(one_sample, square),)), epsilon, bias=False)


def zbox(
    low: float | Sequence[float] = IMAGENET_LOW,
    high: float | Sequence[float] = IMAGENET_HIGH,
    epsilon: float | None = None,
) -> Rule:
    """zB: ``z_ji = w_ji+ (a_i - l_i) + w_ji- (a_i - h_i)`` for inputs between bounds (Montavon et al., 2017, eq. 14).

    The same as ``w_ji a_i - w_ji+ l_i - w_ji- h_i``, written so that no term is negative.

    Args:
        low: Smallest value that an input can have, one for all or one a channel; widened where an input lies below.
        high: Largest value, likewise.
        epsilon: Stabiliser; None for the exact form.
    """
    l, h = (x if isinstance(x, int | float) else tuple(float(v) for v in x) for x in (low, high))  # noqa: E741 - the paper's names
    return _excitation(
        "zB", Part((Term(Above(l), positive), Term(Above(h, below=True), negative))), epsilon, bias=False
    )


def gamma(value: float = 0.25, epsilon: float = 1e-6, *, bias: bool = True) -> Rule:
    """LRP-gamma: ``z_ji = a_i (w_ji + gamma w_ji+)`` (Montavon et al., 2019, section 10.2.3).

    In the form of Andeol et al. (2021) for inputs of both signs: contributions of an output's own sign are the
    boosted ones.

    Args:
        value: The boost.
        epsilon: Stabiliser.
        bias: Whether biases take a share.
    """
    up, down = Boosted(value, positive), Boosted(value, negative)
    parts = (
        Part((Term(positive, up), Term(negative, down)), bias=up if bias else None, sign=1),
        Part((Term(positive, down), Term(negative, up)), bias=down if bias else None, sign=-1),
    )
    return Rule(f"gamma({value:g})", parts, epsilon=epsilon, keeps_sign=False)


def alpha_beta(alpha: float = 2.0, beta: float = 1.0, epsilon: float | None = None, *, bias: bool = False) -> Rule:
    """alpha-beta: ``alpha`` times the positive contributions' shares minus ``beta`` times the negative ones'.

    Bach et al., 2015, eq. 60.

    Args:
        alpha: Weight of what speaks for an output.
        beta: Weight of what speaks against it; ``alpha - beta`` must be 1.
        epsilon: Stabiliser; None for the exact form.
        bias: Whether biases take a share; needs a stabiliser.

    Raises:
        RelpropError: If relevance would not be conserved.
    """
    if alpha < 0 or beta < 0 or abs(alpha - beta - 1) > 1e-9:
        msg = f"alpha_beta needs alpha - beta = 1 with neither below zero, not alpha={alpha:g}, beta={beta:g}."
        raise RelpropError(msg)
    if beta == 0:
        return replace(zplus(epsilon, bias=bias), name=f"alpha{alpha:g}beta0")
    rule = _excitation(f"alpha{alpha:g}beta{beta:g}", Part(_EXCITE, share=alpha), epsilon, bias)
    against = Part(_INHIBIT, share=-beta, bias=negative if bias else None)
    return replace(rule, parts=(*rule.parts, against), keeps_sign=False)


def evened(rule: Rule) -> Rule:
    """The same, with the places within a step of a strided map counting alike; see :mod:`relprop.tents`."""
    return replace(rule, name=f"{rule.name}, evened", even=True)


def _excitation(name: str, part: Part, epsilon: float | None, bias: bool) -> Rule:
    """A rule whose contributions have one sign, exact or stabilised."""
    if bias and epsilon is None:
        msg = f"{name} with a share for biases is not exact; give it a stabiliser too, such as epsilon=1e-6."
        raise RelpropError(msg)
    part = replace(part, bias=positive if bias else None)
    name = name if epsilon is None else f"{name} (+{epsilon:g})"
    return Rule(name, (part,), epsilon=epsilon)


NAMES: dict[str, Callable[[], Rule]] = {
    "epsilon": epsilon,
    "zplus": zplus,
    "z+": zplus,
    "alpha1beta0": zplus,
    "alpha2beta1": alpha_beta,
    "gamma": gamma,
    "flat": flat,
    "w2": w2,
    "wplus": wplus,
    "w+": wplus,
    "zbox": zbox,
    "zB": zbox,
}
"""Rules that may be asked for by name, with their default parameters."""
