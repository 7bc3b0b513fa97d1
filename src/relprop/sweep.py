"""The sweep: forward once, keeping what the plan needs, and the way back.

Forward, a batch norm and a ReLU are computed with the convolution before them, and other activations run in place,
where nobody else needs their input. Back, each node's treatment hands its relevance to its inputs and the ledger notes
what was handed to whom. There is no autograd and nothing is hung on the model: all state lives in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from relprop import samples
from relprop.attention import Matrices
from relprop.errors import RelpropError
from relprop.gates import Product
from relprop.graph import Call, Node
from relprop.ledger import TOLERANCE, Ledger, total
from relprop.maps import Convolution, Dense, LinearMap
from relprop.merges import Split
from relprop.norms import Norm
from relprop.operators import (
    BatchNorm,
    Constant,
    Elementwise,
    Linear,
    Mapped,
    MaxPool,
    Reduction,
    Scalar,
    Sum,
    Unknown,
    reduced,
)
from relprop.plans import FOLD, HALVES, PASS, Plan, Pooling, Treatment
from relprop.rules import Handed, Rule
from relprop.shapes import Moved


@dataclass
class Record:
    """What a forward pass left for the way back.

    Attributes:
        output: The model's output.
        shapes: The shape of every node's value.
        values: The values that are still needed.
    """

    output: Tensor
    shapes: list[tuple[int, ...]]
    values: dict[int, Tensor]


@dataclass
class Sweep:
    """Runs a plan.

    It has no state of its own, so threads may share it.
    """

    plan: Plan

    def __post_init__(self) -> None:
        """Works out what must be kept, and what may be written over."""
        graph = self.plan.graph
        self._consumers = graph.consumers()
        self._norm_of = {
            node.folds: i
            for i, node in enumerate(graph)
            if node.folds is not None and self.plan.treatments[i] in (PASS, FOLD)
        }
        self._weighing = frozenset(i for i, node in enumerate(graph) if self._weighs(node, self.plan.treatments[i]))
        self._kept = frozenset(j for i in range(len(graph)) for j in self._needs(i))
        self._in_place = frozenset(i for i in range(len(graph)) if self._may_overwrite(i))
        activating = {i: j for i in self._in_place if (j := self._activates(i)) is not None}
        self._activating, self._activated = frozenset(activating), frozenset(activating.values())
        self._spare = frozenset(
            j
            for i in self._weighing
            for j in graph.nodes[i].inputs
            if self._is_fresh(j) and not self._divides_output(j)
        )
        self._leads: dict[tuple[tuple[int, ...], ...], tuple[int | None, ...]] = {}

    # -- forward --

    def forward(self, *xs: Tensor) -> Record:
        """Computes the output, and keeps what the way back needs.

        Args:
            *xs: The inputs, with a batch axis; they are never written to.
        """
        graph = self.plan.graph
        # Convolutions are fastest with channels last, and everything after them follows.
        values: dict[int, Any] = {
            i: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for i, x in enumerate(xs)
        }
        shapes: list[tuple[int, ...]] = [tuple(x.shape) for x in xs]
        waiting = [len(c) for c in self._consumers]
        for i, node in enumerate(graph.nodes[graph.inputs :], start=graph.inputs):
            inputs = [values[j] for j in node.inputs]
            values[i] = self._value(i, node, inputs)
            shapes.append(tuple(values[i].shape) if isinstance(values[i], Tensor) else ())
            for j in node.inputs:
                waiting[j] -= 1
                if not waiting[j] and j not in self._kept:
                    del values[j]
        return Record(values[len(graph) - 1], shapes, {i: v for i, v in values.items() if i in self._kept})

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
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
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
            if treatment == FOLD and inputs[0].ndim != 2 and isinstance(self._fold(node.inputs[0]), Dense):
                msg = f"{node.name} does not normalise the outputs of {self.plan.graph.nodes[node.inputs[0]].name}"
                msg += f" but another axis, and cannot be folded into it; use overrides={{{node.name!r}: 'pass'}}."
                raise RelpropError(msg)
            if isinstance(treatment, Pooling) and isinstance(node.operator, MaxPool):
                treatment.check(node.name, node.operator, inputs[0].shape, values[i].shape)
        shapes = tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in values)
        self._leads[shapes[:first]] = tuple(leads)
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
            linear = self._fold(i) if i in self._norm_of else op.linear
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
        return frozenset(self._norm_of)

    def _folds(self, i: int, a: Any) -> bool:
        """Whether a node is computed with the batch norm behind it; of a matrix' outputs, only the last axis is one."""
        return i in self._norm_of and (a.ndim == 2 or not isinstance(self._fold(i), Dense))

    def _fold(self, i: int) -> LinearMap:
        """The linear map at a node with the batch norm behind it folded in."""
        linear, norm = self.plan.graph.nodes[i].operator, self.plan.graph.nodes[self._norm_of[i]].operator
        assert isinstance(linear, Linear) and isinstance(norm, BatchNorm)  # noqa: PT018 - the trace found them
        return linear.folded(norm)

    def _may_overwrite(self, i: int) -> bool:
        """Whether a node's input is fresh memory that nobody else will read."""
        node = self.plan.graph.nodes[i]
        if not isinstance(node.operator, Elementwise) or node.operator.in_place is None:
            return False
        return node.inputs[0] not in self._kept and self._is_fresh(node.inputs[0])

    def _is_fresh(self, j: int) -> bool:
        """Whether a node's value is memory that it alone filled and only one other reads."""
        if len(self._consumers[j]) != 1:
            return False
        producer = self.plan.graph.nodes[j]
        if self._is_folded(j):
            return producer.inputs[0] not in self._kept and self._is_fresh(producer.inputs[0])
        return isinstance(producer.operator, Linear | BatchNorm | Sum)

    def _is_folded(self, i: int) -> bool:
        """Whether a node is a batch norm that is computed inside the linear map before it."""
        node = self.plan.graph.nodes[i]
        return isinstance(node.operator, BatchNorm) and self._norm_of.get(node.inputs[0]) == i

    def _activates(self, i: int) -> int | None:
        """The sum, or the convolution with or without a batch norm behind it, that a ReLU can be computed in."""
        node = self.plan.graph.nodes[i]
        if not isinstance(node.operator, Elementwise) or node.operator.in_place is not torch.relu_:
            return None
        j = node.inputs[0]
        j = self.plan.graph.nodes[j].inputs[0] if self._is_folded(j) else j
        op = self.plan.graph.nodes[j].operator
        return j if isinstance(op, Sum) or (isinstance(op, Linear) and isinstance(op.linear, Convolution)) else None

    def _weighs(self, node: Node, treatment: Treatment) -> bool:
        """Whether a node is a sum whose split looks at the values of the branches."""
        if not isinstance(treatment, Split) or not isinstance(node.operator, Sum):
            return False
        return treatment.weighs and len(self._takers(node, node.operator, treatment)) > 1

    def _needs(self, i: int) -> tuple[int, ...]:
        """The nodes whose values a node needs on the way back."""
        node, treatment = self.plan.graph.nodes[i], self.plan.treatments[i]
        if i in self._weighing and i in self.plan.reached:
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
            needed = (*needed, i) if self._divides_output(i) else needed
        return needed if i in self.plan.reached else ()

    def _divides_output(self, i: int) -> bool:
        """Whether a rule divides by just what the node has computed going forward."""
        treatment, norm = self.plan.treatments[i], self._norm_of.get(i)
        if not isinstance(self.plan.graph.nodes[i].operator, Linear) or not isinstance(treatment, Rule):
            return False
        return treatment.divides_output and (norm is None or self.plan.treatments[norm] == FOLD)

    # -- back --

    def back(
        self,
        record: Record,
        start: Tensor,
        scale: Tensor,
        *,
        layers: Sequence[Call] = (),
        several: bool = False,
        strict: bool = False,
    ) -> tuple[list[Tensor], dict[Call, Tensor], Ledger]:
        """Hands relevance from the output to the inputs.

        Args:
            record: What the forward pass left; used up on the way.
            start: Relevance of the output, ``(T, B, classes)``.
            scale: What all relevance is to be multiplied with in the end, ``(T, B)``: the ledger's unit.
            layers: Calls of modules whose inputs' relevance is wanted.
            several: Whether the user asked for several targets.
            strict: Whether to stop at a leak that no cause explains.

        Returns:
            Relevance of the inputs and of the layers' inputs, ``(T, B, ...)``, not scaled; and the ledger.
        """
        graph = self.plan.graph
        calls = graph.calls
        batch = record.shapes[0][0]
        leads = self._leads.get(tuple(record.shapes[: graph.inputs]), (samples.APART,) * len(graph))
        names, tolerance = tuple(n.name for n in graph), TOLERANCE[start.dtype]
        ledger = Ledger(names, calls, total(start), scale, several, tolerance, graph.inputs)
        signed = not self.plan.keeps_sign or bool((start < 0).any())
        crossing = {
            call: frozenset((i, j) for i in calls[call] for j in graph.nodes[i].inputs if j not in calls[call])
            for call in layers
        }
        caught: dict[Call, Tensor] = {}
        arrived = {len(graph) - 1: _Flow(start, signed, leads[-1], batch)}
        for i in range(len(graph) - 1, graph.inputs - 1, -1):
            flow = arrived.pop(i, None)
            if flow is None:
                continue
            handed = self._hand(i, flow, record, leads)
            # What a rule or a split has computed is in memory of its own; all else may be somebody's view.
            computed = isinstance(self.plan.treatments[i], Rule | Split | Pooling)
            amounts = handed.amounts or (None,) * len(handed.relevance)
            if handed.absorbed:
                ledger.absorbed[i] = {cause: _by_sample(a, batch) for cause, a in handed.absorbed.items()}
            for j, relevance, amount in zip(graph.nodes[i].inputs, handed.relevance, amounts, strict=False):
                if relevance is None:
                    continue
                passed = relevance is flow.relevance and amount is None
                share = flow if passed else _Flow(relevance, signed, leads[j], batch, amount, own=computed)
                ledger.record(i, j, share.amount, share.size)
                for call, edges in crossing.items():
                    if (i, j) in edges:
                        caught[call] = caught[call] + relevance if call in caught else relevance.clone()
                arrived[j] = arrived[j].joined(share) if j in arrived else share
            record.values.pop(i, None)
            if strict:
                ledger.check(i)
        for call, edges in crossing.items():
            if call not in caught:  # a branch that gets nothing
                shape = record.shapes[min(j for _, j in edges)]
                caught[call] = start.new_zeros((len(start), *shape))
        results = [
            arrived[i].relevance if i in arrived else start.new_zeros((len(start), *record.shapes[i]))
            for i in range(graph.inputs)
        ]
        return results, caught, ledger

    def _hand(self, i: int, flow: _Flow, record: Record, leads: Sequence[int | None]) -> Handed:
        """Lets a node's treatment hand its relevance on; where there is none, it passes."""
        node, treatment = self.plan.graph.nodes[i], self.plan.treatments[i]
        op, r = node.operator, flow.relevance
        if isinstance(op, Sum) and isinstance(treatment, Split):
            return self._part(i, op, treatment, flow, record, leads[i])
        if isinstance(op, MaxPool) and isinstance(treatment, Pooling):
            a = record.values[node.inputs[0]]
            if treatment.rule is None:
                return Handed((op.pool.winners(a, record.values[i], r),), {})
            if a.amin() == -torch.inf:  # padded by hand, with what no maximum can be
                a = a.clamp(min=torch.finfo(a.dtype).min / 2**20)
            linear: LinearMap = (op.halves if treatment.halves else op.pool).average(a)
            return treatment.rule(linear, a, r, nonnegative=self._is_nonnegative(node.inputs[0]))
        if isinstance(op, Mapped) and isinstance(treatment, Rule):
            return self._map(i, op, treatment, r, record, leads[i])
        if isinstance(op, Product) and treatment == HALVES:
            op = replace(op, signals=(0, 1), halves=True)
        batch = record.shapes[0][0]
        return op.hand(r, self._inputs(node, record, r), lambda part: samples.summed(part, leads[i], batch))

    def _inputs(self, node: Node, record: Record, r: Tensor) -> list[Any]:
        """A node's inputs; of those whose values were not kept, only the shapes."""
        return [
            record.values[j] if j in record.values else r.new_empty(()).expand(record.shapes[j]) for j in node.inputs
        ]

    def _map(self, i: int, op: Mapped, rule: Rule, r: Tensor, record: Record, lead: int | None) -> Handed:
        """Lets a rule hand relevance through a linear map."""
        node = self.plan.graph.nodes[i]
        values = self._inputs(node, record, r)
        signals = op.signals if isinstance(op, Matrices) else (op.signal,)
        batch = record.shapes[0][0]
        handed: list[Tensor | None] = [None] * len(values)
        absorbed: dict[str, Tensor] = {}
        for k in signals:
            j, a = node.inputs[k], values[k]
            norm = self._norm_of.get(i)
            if norm is not None and self.plan.treatments[norm] == FOLD:
                linear = self._fold(i)
            else:
                linear = op.map_of(k, *values) if isinstance(op, Matrices) else op.map(*values)
            share = r if len(signals) == 1 else r / len(signals)
            if isinstance(op, Reduction) and 0 in [axis % a.ndim for axis in op.axes]:
                result = _over_first(op, rule, a, share, batch, lead)
            elif not samples.are_first(lead, record.shapes[i], batch) and _only_last(op, a):
                # The rule is to see the samples in front, as everywhere.
                share = torch.stack([samples.in_front(part, lead or samples.APART, batch) for part in share])
                in_front = samples.in_front(a, lead or samples.APART, batch)
                linear = op.map(in_front) if isinstance(op, Norm) else linear
                result = rule(linear, in_front, share, nonnegative=self._is_nonnegative(j))
                assert result.relevance[0] is not None
                result = Handed((samples.as_before(result.relevance[0], a.shape),), result.absorbed)
            else:
                y = record.values[i] if self._divides_output(i) else None
                result = rule(linear, a, share, nonnegative=self._is_nonnegative(j), y=y)
            handed[k] = result.relevance[0]
            for cause, amount in result.absorbed.items():
                absorbed[cause] = absorbed[cause] + amount if cause in absorbed else amount
        return Handed(tuple(handed), absorbed)

    def _is_nonnegative(self, i: int) -> bool:
        return self.plan.graph.nodes[i].nonnegative

    def _part(self, i: int, op: Sum, split: Split, flow: _Flow, record: Record, lead: int | None) -> Handed:
        """Splits relevance among the branches of a sum; a constant is one more, with nobody behind it."""
        node, r = self.plan.graph.nodes[i], flow.relevance
        takers = self._takers(node, op, split)
        branches: list[Tensor] = []
        if i in self._weighing:
            values: list[Any] = op.branches([record.values[j] for j in node.inputs])
            if op.constant is not None:
                values.append(torch.as_tensor(op.constant, dtype=r.dtype, device=r.device))
            branches = [values[b].expand(record.shapes[i]) for b in takers]
        known = [b < len(node.inputs) and op.factors[b] > 0 and self._is_nonnegative(node.inputs[b]) for b in takers]
        batch = record.shapes[0][0]
        if samples.are_first(lead, record.shapes[i], batch):
            spare = [b < len(node.inputs) and node.inputs[b] in self._spare for b in takers]
            handed = split(branches, len(takers), r, known, [*spare, flow.own])
        else:
            lead = lead or samples.APART
            branches = [samples.in_front(branch, lead, batch) for branch in branches]
            handed = split(branches, len(takers), torch.stack([samples.in_front(p, lead, batch) for p in r]), known)
            back = (None if h is None else samples.as_before(h, record.shapes[i]) for h in handed.relevance)
            handed = Handed(tuple(back), handed.absorbed)
        relevance: list[Tensor | None] = [None] * len(node.inputs)
        amounts: list[Tensor | None] = [None] * len(node.inputs)
        absorbed = dict(handed.absorbed)
        for b, share, amount in zip(takers, handed.relevance, handed.amounts or (None,) * len(takers), strict=True):
            if share is None:
                continue
            # What depends on nothing but shapes may be one for all samples, which could not be told apart there.
            if b == len(node.inputs) or isinstance(self.plan.graph.nodes[node.inputs[b]].operator, Constant):
                kept = samples.summed(share, lead, batch)
                absorbed["constant"] = absorbed["constant"] + kept if "constant" in absorbed else kept
            else:
                relevance[b] = reduced(share, record.shapes[node.inputs[b]])
                amounts[b] = None if amount is None else _by_sample(amount, batch)
        return Handed(tuple(relevance), absorbed, tuple(amounts))

    def _takers(self, node: Node, op: Sum, split: Split) -> list[int]:
        return split.takers(op.parts, node.main, self.plan.closed(node))


class _Flow:
    """Relevance on its way, with its sums; its own, if nobody else has a view of the memory it lies in."""

    def __init__(
        self,
        relevance: Tensor,
        signed: bool,
        lead: int | None,
        batch: int,
        amount: Tensor | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.relevance = relevance
        self.amount = samples.summed(relevance, lead, batch) if amount is None else amount
        self.size = samples.summed(relevance, lead, batch, size=True) if signed else self.amount
        self.own = own and 0 not in relevance.stride()

    def joined(self, other: _Flow) -> _Flow:
        """The sum of two flows; written over one of them if that is nobody else's."""
        both = object.__new__(_Flow)
        one, two = (other, self) if other.own else (self, other)
        both.relevance = one.relevance.add_(two.relevance) if one.own else one.relevance + two.relevance
        both.amount, both.size, both.own = self.amount + other.amount, self.size + other.size, True
        return both


def _over_first(op: Reduction, rule: Rule, a: Tensor, r: Tensor, batch: int, lead: int | None) -> Handed:
    """A rule at a mean over the first axis, where that is not the samples': they are moved in front of it."""
    axes = {axis % a.ndim for axis in op.axes}
    samples_at = next(k for k in range(a.ndim) if k not in axes and a.shape[k] == batch)
    moved = Reduction(op.label, op.inputs, tuple(axis + (axis < samples_at) for axis in axes), op.keep, op.mean)
    in_front = a.movedim(samples_at, 0)
    at = next(k for k in range(r.ndim - 1) if prod(r.shape[1 : 1 + k]) == (lead or 1) and r.shape[1 + k] == batch)
    result = rule(moved.map(in_front), in_front, r.movedim(at + 1, 1))
    assert result.relevance[0] is not None
    return Handed((result.relevance[0].movedim(1, samples_at + 1),), result.absorbed)


def _only_last(op: Mapped, a: Tensor) -> bool:
    """Whether a map mixes nothing but elements of the last axis, so that others may change places."""
    if isinstance(op, Norm):
        return op.average(a).shape[:-1] == a.shape[:-1]
    return isinstance(op, Linear) and isinstance(op.linear, Dense)


def _by_sample(amount: Tensor, batch: int) -> Tensor:
    """Sums what was absorbed, ``(T, items)``, over the items of each sample."""
    return amount if amount.shape[1] == batch else amount.reshape(len(amount), batch, -1).sum(2)


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
