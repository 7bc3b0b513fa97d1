"""Gates: products of two things that the input decides about.

Where a signal is multiplied by a gate (squeeze-and-excitation, GLU, an attention's weights), the gate counts as a
constant and all relevance goes to the signal: the signal-takes-all rule of Arras et al. (2019), and what Ali et al.
(2022) do with attention. Which of the two is the gate is read from the graph: it comes out of a softmax or a sigmoid,
was itself computed from the signal, is one number for many elements, or comes out of some other activation. Where
nothing tells, both get half: the uniform rule of Achtibat et al. (2024, section 3.3). Either way nothing is lost.

References:
    Arras et al., 2019: Explaining and Interpreting LSTMs.
    Ali et al., 2022: XAI for Transformers: Better Explanations through Conservative Propagation.
    Achtibat et al., 2024: AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.activations import GATES
from relprop.attention import Matrices
from relprop.graph import Node
from relprop.mapped import Linear, Mapped
from relprop.operators import Elementwise, Operator, Ref, Reshape, Sum, Total, bound, reduced, register, rewrite
from relprop.rules import Handed
from relprop.shapes import Joined, Moved


@dataclass(eq=False)
class Product(Operator):
    """Two things multiplied, element by element.

    Attributes:
        function: The product, or the quotient.
        signals: Positions of the inputs that can get relevance.
        halves: Whether both get half of it; otherwise, of two, the one that was not broadcast gets it all.
        prefers: The one that does where neither was broadcast; None for half each.
    """

    function: Callable[..., Tensor]
    signals: tuple[int, ...] = (0, 1)
    halves: bool = False
    prefers: int | None = None

    @property
    def heirs(self) -> tuple[int, ...]:
        return self.signals

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        signals = self.chosen([v.numel() for v in values], r[0].numel())
        share = r if len(signals) == 1 else r / len(signals)
        return Handed(tuple(reduced(share, v.shape) if k in signals else None for k, v in enumerate(values)), {})

    def chosen(self, sizes: Sequence[int], whole: int) -> tuple[int, ...]:
        """The positions of the inputs that get relevance, in equal parts, when they and the product are so large."""
        if len(self.signals) == 1 or self.halves:
            return self.signals
        complete = [k for k, size in enumerate(sizes) if size == whole]
        if len(complete) == 1:
            return tuple(complete)
        return self.signals if self.prefers is None else (self.prefers,)


# -- which of two is the signal --


def decide(nodes: Sequence[Node]) -> None:
    """Finds the signals of all products of a graph."""
    before: list[int] = []
    for i, node in enumerate(nodes):
        ancestors = 1 << i
        for j in node.inputs:
            ancestors |= before[j]
        before.append(ancestors)
        op: Any = node.operator
        if getattr(op, "signals", ()) == (0, 1):
            op.signals, hint = _signals(nodes, before, node.inputs[0], node.inputs[1])
            if isinstance(op, Product):
                op.prefers = hint
            elif hint is not None:  # matrices are not broadcast
                op.signals = (hint,)


def _signals(nodes: Sequence[Node], before: Sequence[int], left: int, right: int) -> tuple[tuple[int, ...], int | None]:
    """The positions of the signals, and of the likelier one where that is not certain."""
    if left == right:
        return (0,), None
    shared = before[left] & before[right]  # an activation that both come out of tells nothing
    ranks = _rank(nodes, left, shared), _rank(nodes, right, shared)
    gates = [rank >= TANH for rank in ranks]
    made = [before[left] >> right & 1 == 1, before[right] >> left & 1 == 1]  # each of the other
    for looks in (gates, made, ranks if all(gates) else ()):
        if looks and looks[0] != looks[1]:
            return ((0,) if looks[0] < looks[1] else (1,)), None
    mixed = [not _attends(nodes, i) for i in (left, right)]
    for looks in (ranks, mixed):
        if looks[0] != looks[1]:
            return (0, 1), (0 if looks[0] < looks[1] else 1)
    return (0, 1), None


NUMBER, SOFTMAX, SIGMOID, TANH, OTHER, NONE = 5, 4, 3, 2, 1, 0
"""What a value comes out of; the higher, the more it looks like a gate."""


def _rank(nodes: Sequence[Node], i: int, shared: int) -> int:
    op = nodes[i].operator
    if not op.heirs or shared >> i & 1:
        return NONE if op.heirs else NUMBER
    if isinstance(op, Elementwise) and op.label in GATES:
        return SOFTMAX if "soft" in op.label else TANH if op.label == "tanh" else SIGMOID
    several = isinstance(op, Product | Joined)
    rank = max(_rank(nodes, op.inputs[k].node, shared) for k in (range(len(op.inputs)) if several else op.heirs[:1]))
    if isinstance(op, Elementwise):
        return max(rank, NONE if op.identity else OTHER)
    if isinstance(op, Linear):  # an attention's weights, mixed among its heads
        return SOFTMAX if rank == SOFTMAX else NONE
    return rank if several or _passes(op) else NONE


def _passes(op: Operator) -> bool:
    """Whether an operator leaves a gate a gate: moves, averages, norms, constants added."""
    mapped = isinstance(op, Mapped) and not op.weighted and not isinstance(op, Matrices)
    return isinstance(op, Reshape | Moved) or mapped or (isinstance(op, Sum) and len(op.inputs) == 1)


def _attends(nodes: Sequence[Node], i: int) -> bool:
    """Whether a value is one that an attention has mixed already: what is left to multiply it with is a query."""
    op = nodes[i].operator
    if isinstance(op, Reshape | Moved):
        return _attends(nodes, op.inputs[0].node)
    return isinstance(op, Matrices) and len(op.signals) == 1


# -- their spellings --


@register(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply", numbers=True)
def _mul(a: Any, b: Any = None, *, other: Any = None) -> Operator:
    return _product("mul", torch.mul, a, b if other is None else other)


@register(operator.truediv, operator.itruediv, torch.div, torch.divide, "div", "div_", numbers=True)
def _div(a: Any, b: Any = None, *, other: Any = None) -> Operator:
    if not isinstance(a, Ref):
        msg = "a quotient whose denominator alone depends on the input"
        raise TypeError(msg)
    product = _product("div", torch.div, a, b if other is None else other)
    if isinstance(product, Product):
        product.signals = (0,)  # what normalises is a constant
    return product


def _product(label: str, function: Callable[..., Tensor], a: Any, b: Any) -> Operator:
    if isinstance(a, Ref) and isinstance(b, Ref):
        return Product(label, (a, b), bound(function, (a, b), {}))
    x, factor = (a, b) if isinstance(a, Ref) else (b, a)
    if isinstance(factor, Tensor) and factor.ndim:
        return Product(label, (x,), bound(function, (a, b), {}), (0,))
    return Elementwise(label, (x,), bound(function, (a, b), {}), nonnegative=None if factor >= 0 else False)


@register(operator.neg, torch.neg, torch.negative, "neg", "neg_")
def _neg(x: Ref) -> Operator:
    return Elementwise("neg", (x,), torch.neg)


@rewrite(torch.addcmul, "addcmul", "addcmul_")
def _addcmul(x: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    product = tensor1 * tensor2
    return x + (product if value == 1 else product * value)


@rewrite(torch.lerp, "lerp")
def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return x * (1 - weight) + end * weight


@register(F.glu)
def _glu(x: Ref, dim: int = -1) -> Operator:
    return Glu("glu", (x,), dim)


register(nn.GLU)(lambda m, x: _glu(x, m.dim))


@dataclass(eq=False)
class Glu(Operator):
    """The first half times the sigmoid of the second: the second is the gate."""

    axis: int

    def forward(self, *values: Any) -> Any:
        return F.glu(values[0], self.axis)

    def probe(self, *values: Any) -> Tensor:
        return values[0].chunk(2, self.axis)[0]  # type: ignore[no-any-return] # a tensor's half is a tensor

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        axis = self.axis % (r.ndim - 1) + 1
        return Handed((torch.cat([r, torch.zeros_like(r)], axis), *[None] * (len(values) - 1)), {})
