"""Gates: products of two things that the input decides about.

Where a signal is multiplied by a gate (squeeze-and-excitation, GLU, an attention's weights), the gate counts as a
constant and all relevance goes to the signal: the signal-takes-all rule of Arras et al. (2019), and what Ali et al.
(2022) do with attention. Which of the two is the gate is read from the graph: it comes out of a sigmoid or a softmax,
of some other activation, or it was itself computed from the signal. Where nothing tells, both get half: the uniform
rule of Achtibat et al. (2024, section 3.3). Either way nothing is lost.

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
from relprop.graph import Node
from relprop.operators import (
    Elementwise,
    Linear,
    Mapped,
    Operator,
    Ref,
    Reshape,
    Sum,
    Total,
    bound,
    reduced,
    register,
    rewrite,
)
from relprop.rules import Handed
from relprop.shapes import Joined, Moved


@dataclass(eq=False)
class Product(Operator):
    """Two things multiplied, element by element.

    Attributes:
        function: The product, or the quotient.
        signals: Positions of the inputs that get relevance, in equal parts.
    """

    function: Callable[..., Tensor]
    signals: tuple[int, ...] = (0, 1)

    @property
    def heirs(self) -> tuple[int, ...]:
        return self.signals

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        share = r if len(self.signals) == 1 else r / len(self.signals)
        return Handed(tuple(reduced(share, v.shape) if k in self.signals else None for k, v in enumerate(values)), {})


# -- which of two is the signal --


def decide(nodes: Sequence[Node]) -> None:
    """Finds the signals of all products of a graph."""
    before: list[int] = []
    for i, node in enumerate(nodes):
        ancestors = 1 << i
        for j in node.inputs:
            ancestors |= before[j]
        before.append(ancestors)
        if getattr(node.operator, "signals", ()) == (0, 1):
            node.operator.signals = _signals(nodes, before, node.inputs[0], node.inputs[1])  # type: ignore[attr-defined]


def _signals(nodes: Sequence[Node], before: Sequence[int], left: int, right: int) -> tuple[int, ...]:
    if left == right:
        return (0,)
    ranks = _rank(nodes, left), _rank(nodes, right)
    gates = [rank >= 2 for rank in ranks]
    made = [before[left] >> right & 1 == 1, before[right] >> left & 1 == 1]  # each of the other
    for looks in (gates, made, ranks):
        if looks[0] != looks[1]:
            return (0,) if looks[0] < looks[1] else (1,)
    return (0, 1)


def _rank(nodes: Sequence[Node], i: int) -> int:
    """How much a value looks like a gate: 3 a number, 2 of a sigmoid or softmax, 1 of another activation, 0 neither."""
    op = nodes[i].operator
    if not op.heirs:
        return 3
    if isinstance(op, Elementwise):
        if op.label in GATES:
            return 2
        return max(_rank(nodes, op.inputs[0].node), 0 if op.identity else 1)
    if isinstance(op, Product):
        return max(_rank(nodes, ref.node) for ref in op.inputs)
    passes = isinstance(op, Reshape | Moved) or (isinstance(op, Mapped) and not isinstance(op, Linear))
    if passes or (isinstance(op, Sum) and len(op.inputs) == 1):
        return _rank(nodes, op.inputs[op.heirs[0]].node)
    return max(_rank(nodes, ref.node) for ref in op.inputs) if isinstance(op, Joined) else 0


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
