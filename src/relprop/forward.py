"""Forward: a plan's graph computed once, keeping what the way back needs.

A batch norm and a ReLU are computed with the convolution before them, and other activations run in place, where nobody
else needs their input. Where memory is short, only the values between blocks are kept, and the others are computed
again when the way back comes to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from relprop import samples
from relprop.convolution import Convolution
from relprop.errors import RelpropError
from relprop.graph import Node
from relprop.mapped import BatchNorm, Linear, Mapped, Reduction
from relprop.maps import Dense, LinearMap
from relprop.merges import Split
from relprop.operators import Constant, Elementwise, MaxPool, Scalar, Sum, Unknown
from relprop.plans import Plan, Treatment
from relprop.presets import FOLD, PASS, Pooling
from relprop.rules import Rule
from relprop.shapes import Moved
from relprop.transforms import tiny

_REFUSALS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    NotImplementedError,  # where a function cannot tell a shape without contents
)
"""What torch raises where a shape does not fit."""


@dataclass
class Record:
    """What a forward pass left for the way back.

    Attributes:
        output: The model's output.
        shapes: The shape of every node's value.
        values: The values that are still needed.
        cuts: The nodes between which values have to be computed again; none if all were kept.
    """

    output: Tensor
    shapes: Sequence[tuple[int, ...]]
    values: dict[int, Any]
    cuts: Sequence[int] = ()


@dataclass
class Forward:
    """Runs a plan's graph forward.

    It has no state of its own, so threads may share it.

    Attributes:
        plan: The plan.
        weighing: The sums whose splits look at the values of their branches.
        spare: The branches that may be written over when they are split.
    """

    plan: Plan

    def __post_init__(self) -> None:
        """Works out what must be kept, and what may be written over."""
        graph = self.plan.graph
        self._consumers = graph.consumers()
        self._last = [max(consumers, default=len(graph)) for consumers in self._consumers]
        self.norms = {
            node.folds: i
            for i, node in enumerate(graph)
            if node.folds is not None and self.plan.treatments[i] in (PASS, FOLD)
        }
        self.weighing = frozenset(i for i, node in enumerate(graph) if self._weighs(node, self.plan.treatments[i]))
        self._kept = frozenset(j for i in range(len(graph)) for j in self._needs(i))
        self._lasting = self._kept - {j for i in range(len(graph)) if (j := self._stands_for(i)) is not None}
        self._in_place = frozenset(i for i in range(len(graph)) if self._may_overwrite(i))
        activating = {i: j for i in self._in_place if (j := self._activates(i)) is not None}
        self._activating, self._activated = frozenset(activating), frozenset(activating.values())
        self.spare = frozenset(
            j for i in self.weighing for j in graph.nodes[i].inputs if self._is_fresh(j) and not self.divides_output(j)
        )
        self.leads: dict[tuple[tuple[int, ...], ...], tuple[int | None, ...]] = {}

    def __call__(self, *xs: Tensor, cuts: Sequence[int] = ()) -> Record:
        """Computes the output, and keeps what the way back needs.

        Args:
            *xs: The inputs, with a batch axis; they are never written to.
            cuts: The nodes below the last of which only the values at the others are kept.
        """
        graph = self.plan.graph
        # Convolutions are fastest with channels last, and everything after them follows.
        values: dict[int, Any] = {
            i: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for i, x in enumerate(xs)
        }
        shapes: list[tuple[int, ...]] = [tuple(x.shape) for x in xs]
        last = cuts[-1] if cuts else 0
        kept = {*cuts, *(j for j in self._kept if j >= last), *(range(graph.inputs) if cuts else ())}
        for i, value in self._through(values, range(graph.inputs, len(graph)), kept):
            shapes.append(tuple(value.shape) if isinstance(value, Tensor) else ())
            if cuts and not isinstance(value, Tensor):
                kept.add(i)
        return Record(values[len(graph) - 1], shapes, {i: v for i, v in values.items() if i in kept}, cuts)

    def again(self, record: Record, below: int, above: int) -> None:
        """Computes what the way back needs between two cuts."""
        values = dict(record.values)
        for _ in self._through(values, range(below + 1, above), self._kept):
            pass
        record.values.update({i: v for i, v in values.items() if below < i < above and i in self._kept})

    def _through(self, values: dict[int, Any], nodes: range, kept: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Computes some nodes in turn, and drops each value that is not kept behind its last reader."""
        for i in nodes:
            node = self.plan.graph.nodes[i]
            values[i] = self._value(i, node, [values[j] for j in node.inputs])
            yield i, values[i]
            for j in node.inputs:
                if self._last[j] <= i and j not in kept:
                    values.pop(j, None)

    def cuts(self, shapes: Sequence[tuple[int, ...]], parts: int = 8) -> list[int]:
        """Nodes that all later ones depend on alone, about evenly by the values that are kept between them.

        Args:
            shapes: The shape of every node's value.
            parts: About how many parts the graph is to be cut into.
        """
        sizes = [prod(shape) if i in self._kept else 0 for i, shape in enumerate(shapes)]
        chosen: list[int] = []
        since = furthest = 0
        for i, node in enumerate(self.plan.graph.nodes[:-1]):
            since += sizes[i]
            alone = furthest <= i
            if isinstance(node.operator, Constant) or not isinstance(node.operator, Scalar):  # numbers are kept anyway
                furthest = max(furthest, self._last[i])
            if i >= self.plan.graph.inputs and alone and sizes[i] and since >= sum(sizes) / parts:
                chosen.append(i)
                since = 0
        return chosen

    def shapes(self, *xs: Tensor) -> tuple[tuple[int, ...], ...]:
        """Works out the shape of every node's value without computing any.

        Raises:
            RelpropError: If a node cannot take what comes in, or the output is not ``(batch, classes)``.
        """
        x, first = xs[0], self.plan.graph.inputs
        values: list[Any] = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in xs]
        leads: list[int | None] = [samples.APART] * first
        for i, node in enumerate(self.plan.graph.nodes[first:], start=first):
            inputs = [values[j] for j in node.inputs]
            _check_shape(node, inputs[0] if inputs else None, x)
            try:
                values.append(node.operator.shape(*inputs))
            except _REFUSALS as error:
                reason = str(error).strip().split("\n")[0].rstrip(".")
                shape = tuple(inputs[0].shape) if isinstance(inputs[0], Tensor) else inputs[0]
                msg = f"{node.name} ({node.operator.label}) cannot take {shape}: {reason}."
                raise RelpropError(msg) from None
            leads.append(samples.lead(node.operator, inputs, [leads[j] for j in node.inputs], values[i], len(x)))
            if i not in self.plan.reached or isinstance(node.operator, Scalar):
                continue
            self._check_apart(node, values[i], inputs, leads[i], len(x))
            if isinstance(node.operator, Unknown):
                node.operator.check(inputs[0], values[i])
            treatment = self.plan.treatments[i]
            if isinstance(treatment, Rule):
                treatment.check(inputs[0])
            if treatment == FOLD and inputs[0].ndim != 2 and isinstance(self.fold(node.inputs[0]), Dense):
                msg = f"{node.name} does not normalise the outputs of {self.plan.graph.nodes[node.inputs[0]].name}"
                msg += f" but another axis, and cannot be folded into it; use overrides={{{node.name!r}: 'pass'}}."
                raise RelpropError(msg)
            if isinstance(treatment, Pooling) and isinstance(node.operator, MaxPool):
                treatment.check(node.name, node.operator, inputs[0].shape, values[i].shape)
        shapes = tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in values)
        self.leads[shapes[:first]] = tuple(leads)
        if len(shapes[-1]) < 2 or shapes[-1][0] != len(x) or leads[-1] != samples.APART:
            what = "The model's output" if self.plan.layer is None else f"The output of {self.plan.layer}"
            msg = (
                f"{what} has shape {shapes[-1]} for a batch of {len(x)}; relprop explains outputs of shape (batch, "
                "classes), or (batch, classes, height, width) and the like."
            )
            raise RelpropError(msg)
        return shapes

    @staticmethod
    def _check_apart(node: Node, after: Any, inputs: Sequence[Any], lead: int | None, batch: int) -> None:
        """Refuses a value in which the samples of a batch cannot be told apart."""
        op = node.operator
        mixed = lead is None if batch > 1 else len(inputs[0]) == 1
        if isinstance(op, Reduction) and mixed and 0 in [axis % inputs[0].ndim for axis in op.axes]:
            msg = f"{op.label} over axis 0 mixes the samples of a batch, so it has no rule; leave that axis out."
            raise RelpropError(msg)
        if lead is None or (isinstance(after, Tensor) and after.numel() % (lead * batch)):
            msg = (
                f"{node.name} ({op.label}, {node.source}) makes {tuple(getattr(after, 'shape', ()))} of a batch of "
                f"{batch}; relprop needs the samples to stay apart."
            )
            raise RelpropError(msg)

    def _value(self, i: int, node: Node, inputs: Sequence[Any]) -> Any:
        op = node.operator
        if isinstance(op, Linear) and (i in self._activated or self._folds(i, inputs[0])):
            linear = self.fold(i) if i in self.norms else op.linear
            return linear.activated(inputs[0]) if i in self._activated else linear(inputs[0])
        if isinstance(op, Sum) and i in self._activated:
            return op.activated(*inputs)
        if i in self._activating or (self._is_folded(i) and self._folds(node.inputs[0], inputs[0])):
            return inputs[0]
        if i in self._in_place and isinstance(op, Elementwise) and op.in_place is not None:
            return op.in_place(inputs[0])
        return op.forward(*inputs)

    @property
    def folded(self) -> frozenset[int]:
        """The linear maps that are computed with the batch norm behind them: all that a plan changes going forward."""
        return frozenset(self.norms)

    def _folds(self, i: int, a: Any) -> bool:
        """Whether a node is computed with the batch norm behind it; of a matrix' outputs, only the last axis is one."""
        return i in self.norms and (a.ndim == 2 or not isinstance(self.fold(i), Dense))

    def fold(self, i: int) -> LinearMap:
        """The linear map at a node with the batch norm behind it folded in."""
        linear, norm = self.plan.graph.nodes[i].operator, self.plan.graph.nodes[self.norms[i]].operator
        assert isinstance(linear, Linear) and isinstance(norm, BatchNorm)  # noqa: PT018 - the trace found them
        return linear.folded(norm)

    def _may_overwrite(self, i: int) -> bool:
        """Whether a node's input is fresh memory that nobody else will read."""
        node = self.plan.graph.nodes[i]
        if not isinstance(node.operator, Elementwise) or node.operator.in_place is None:
            return False
        return node.inputs[0] not in self._lasting and self._is_fresh(node.inputs[0])

    def _is_fresh(self, j: int) -> bool:
        """Whether a node's value is memory that it alone filled and only one other reads."""
        if len(self._consumers[j]) != 1:
            return False
        producer = self.plan.graph.nodes[j]
        if self._is_folded(j):
            return producer.inputs[0] not in self._lasting and self._is_fresh(producer.inputs[0])
        return isinstance(producer.operator, Linear | BatchNorm | Sum)

    def _is_folded(self, i: int) -> bool:
        """Whether a node is a batch norm that is computed inside the linear map before it."""
        node = self.plan.graph.nodes[i]
        return isinstance(node.operator, BatchNorm) and self.norms.get(node.inputs[0]) == i

    def _activates(self, i: int) -> int | None:
        """The sum, or the convolution with or without a batch norm behind it, that a ReLU can be computed in."""
        node = self.plan.graph.nodes[i]
        if not isinstance(node.operator, Elementwise) or node.operator.in_place is not torch.relu_:
            return None
        j = node.inputs[0]
        j = self.plan.graph.nodes[j].inputs[0] if self._is_folded(j) else j
        op = self.plan.graph.nodes[j].operator
        return j if isinstance(op, Sum) or (isinstance(op, Linear) and isinstance(op.linear, Convolution)) else None

    def _stands_for(self, i: int) -> int | None:
        """The map that may divide by a ReLU of its output instead, since no relevance comes where that is zero."""
        j = self._activates(i)
        rule = None if j is None else self.plan.treatments[j]
        if j is None or not isinstance(rule, Rule) or not self.divides_output(j) or rule.relative:
            return None
        if rule.epsilon is None or rule.epsilon < tiny(torch.float32):  # 0/0
            return None
        alone = all(len(self._consumers[k]) == 1 for k in {j, self.plan.graph.nodes[i].inputs[0]})
        heirs = [k for k in self._consumers[i] if k in self.plan.reached]
        return j if alone and heirs and all(self._skips_zeros(k) for k in heirs) else None

    def _skips_zeros(self, i: int) -> bool:
        """Whether a node hands nothing to elements of its inputs that are zero."""
        treatment = self.plan.treatments[i]
        if isinstance(treatment, Split):
            return i in self.weighing and treatment.skips_zeros
        rule = treatment.rule if isinstance(treatment, Pooling) else treatment
        return isinstance(rule, Rule) and rule.skips_zeros

    def _weighs(self, node: Node, treatment: Treatment) -> bool:
        """Whether a node is a sum whose split looks at the values of the branches."""
        if not isinstance(treatment, Split) or not isinstance(node.operator, Sum):
            return False
        return treatment.weighs and len(self.takers(node, node.operator, treatment)) > 1

    def _needs(self, i: int) -> tuple[int, ...]:
        """The nodes whose values a node needs on the way back."""
        node, treatment = self.plan.graph.nodes[i], self.plan.treatments[i]
        if i in self.weighing and i in self.plan.reached:
            return node.inputs
        op = node.operator
        needed: tuple[int, ...] = ()
        if isinstance(treatment, Pooling):
            needed = (node.inputs[0],) if treatment.rule else (node.inputs[0], i)
        elif op.looks:
            needed = node.inputs
        elif isinstance(op, Moved):  # what says where elements go
            numbers = [isinstance(self.plan.graph.nodes[j].operator, Scalar) for j in node.inputs]
            needed = tuple(j for k, j in enumerate(node.inputs) if numbers[k] or k not in op.heirs)
        elif isinstance(op, Mapped) and isinstance(treatment, Rule):
            makers = tuple(node.inputs[k] for k in op.makers)
            needed = (*makers, node.inputs[op.signal]) if treatment.needs_input() else makers
            needed = (*needed, i) if self.divides_output(i) else needed
        return needed if i in self.plan.reached else ()

    def divides_output(self, i: int) -> bool:
        """Whether a rule divides by just what the node has computed going forward."""
        treatment, norm = self.plan.treatments[i], self.norms.get(i)
        if not isinstance(self.plan.graph.nodes[i].operator, Linear) or not isinstance(treatment, Rule):
            return False
        return treatment.divides_output and (norm is None or self.plan.treatments[norm] == FOLD)

    def takers(self, node: Node, op: Sum, split: Split) -> list[int]:
        """The branches of a sum that get relevance."""
        return split.takers(op.parts, node.main, self.plan.closed(node))


def _check_shape(node: Node, a: Any, x: Tensor) -> None:
    """Says in our words what torch would say in its own when an input does not fit a linear map."""
    linear = node.operator.linear if isinstance(node.operator, Linear) else None
    if isinstance(linear, Convolution):
        channels, axes = linear.weight.shape[1] * linear.groups, linear.weight.ndim - 2
        sizes = ("length",) if axes == 1 else ("depth", "height", "width")[3 - axes :]
        fits, wanted = a.ndim == axes + 2 and a.shape[1] == channels, f"(batch, {channels}, {', '.join(sizes)})"
    elif isinstance(linear, Dense):
        fits, wanted = a.shape[-1] == linear.weight.shape[1], f"(batch, ..., {linear.weight.shape[1]})"
    else:
        return
    if not fits:
        msg = (
            f"{node.name} expects {wanted}, but an input of shape {tuple(x.shape)} gives it {tuple(a.shape)}; mend "
            "the input's axes or size."
        )
        raise RelpropError(msg)
