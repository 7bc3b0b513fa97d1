"""The sweep: the way back.

Each node's treatment hands its relevance to its inputs, and the ledger notes what was handed to whom. There is no
autograd and nothing is hung on the model: all state lives in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from relprop import concepts, samples
from relprop.attention import Matrices
from relprop.dues import Due
from relprop.errors import RelpropError
from relprop.flows import Flow
from relprop.forward import Forward, Record
from relprop.fused import taken
from relprop.gates import Product
from relprop.graph import Call, Graph, Node
from relprop.ledger import TOLERANCE, Ledger, total
from relprop.mapped import Linear, Mapped, Reduction
from relprop.maps import Dense, LinearMap
from relprop.merges import Split
from relprop.norms import Norm
from relprop.operators import Constant, MaxPool, Operator, Sum, reduced
from relprop.plans import Plan
from relprop.presets import FOLD, HALVES, Pooling
from relprop.requests import OUTPUT
from relprop.rules import Handed, Rule


@dataclass
class Sweep:
    """Runs a plan.

    It has no state of its own, so threads may share it.
    """

    plan: Plan

    def __post_init__(self) -> None:
        """Prepares the way forward, which has to keep what the way back needs."""
        self.forward = Forward(self.plan)

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
            layers: Calls of modules whose inputs' relevance is wanted, or that of their outputs, with
                :data:`relprop.requests.OUTPUT` behind the name.
            several: Whether the user asked for several targets.
            strict: Whether to stop at a leak that no cause explains.

        Returns:
            Relevance of the inputs and of the layers' inputs, ``(T, B, ...)``, not scaled; and the ledger.
        """
        graph = self.plan.graph
        calls = graph.calls
        batch = record.shapes[0][0]
        leads = self.forward.leads.get(tuple(record.shapes[: graph.inputs]), (samples.APART,) * len(graph))
        names, tolerance = tuple(n.name for n in graph), TOLERANCE[start.dtype]
        ledger = Ledger(names, calls, total(start), scale, several, tolerance, graph.inputs)
        signed = not self.plan.keeps_sign or bool((start < 0).any())
        crossing = {call: _crossing(graph, call) for call in layers}
        caught = {call: start.clone() for call, edges in crossing.items() if not edges}  # whose output is the model's
        source: dict[Call, int] = {}
        arrived = {len(graph) - 1: Flow(start, signed, leads[-1], batch)}
        waiting: list[tuple[int, int, Flow]] = []
        cuts = list(record.cuts)
        for i in range(len(graph) - 1, graph.inputs - 1, -1):
            if cuts and i == cuts[-1]:
                cuts.pop()
                self.forward.again(record, cuts[-1] if cuts else graph.inputs - 1, i)
            flow = arrived.pop(i, None)
            if flow is None:
                continue
            _settle(arrived.values())  # lest a factor is kept, or written over, before its product is taken
            handed = self._hand(i, flow, record, leads)
            if handed.absorbed:
                ledger.absorbed[i] = {cause: samples.gathered(a, batch) for cause, a in handed.absorbed.items()}
            for j, share in self._shares(i, handed, flow, leads, batch):
                waiting.append((i, j, share))
                for call, edges in crossing.items():
                    if (i, j) in edges:
                        _check_one(graph, call, source.setdefault(call, j), j)
                        caught[call] = caught[call] + share.relevance if call in caught else share.relevance.clone()
                arrived[j] = arrived[j].joined(share) if j in arrived else share
            record.values.pop(i, None)
            if strict:
                _settle(arrived.values())
            waiting = [edge for edge in waiting if not _noted(ledger, *edge)]
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
        for edge in waiting:
            _noted(ledger, *edge)
        return results, caught, ledger

    def _shares(
        self, i: int, handed: Handed, flow: Flow, leads: Sequence[int | None], batch: int
    ) -> Iterator[tuple[int, Flow]]:
        """What each input of a node gets, with its sums; what several get is summed up once."""
        # What a rule or a split has computed is in memory of its own; all else may be somebody's view.
        computed = isinstance(self.plan.treatments[i], Rule | Split | Pooling)
        unknown = (None,) * len(handed.relevance)
        known: dict[tuple[int, int | None], Flow] = {}
        for j, relevance, amount, size in zip(
            self.plan.graph.nodes[i].inputs,
            handed.relevance,
            handed.amounts or unknown,
            handed.sizes or unknown,
            strict=False,
        ):
            if relevance is None:
                continue
            if relevance is flow.memory and amount is None:
                yield j, flow
                continue
            key = id(relevance), leads[j]
            if key not in known:
                own = computed and sum(_together(other, relevance) for other in handed.relevance) == 1
                first = samples.are_first(leads[j], relevance.shape[1:], batch)
                sums = (samples.gathered(of, batch) if first and of is not None else None for of in (amount, size))
                share = relevance if handed.factor is None else Due(relevance, handed.factor)
                known[key] = Flow(share if first else taken(share), flow.signed, leads[j], batch, *sums, own=own)
            yield j, known[key]

    def _hand(self, i: int, flow: Flow, record: Record, leads: Sequence[int | None]) -> Handed:
        """Lets a node's treatment hand its relevance on; where there is none, it passes."""
        node, treatment = self.plan.graph.nodes[i], self.plan.treatments[i]
        op = node.operator
        if isinstance(op, Sum) and isinstance(treatment, Split):
            return self._part(i, op, treatment, flow, record, leads[i])
        if isinstance(op, MaxPool) and isinstance(treatment, Pooling):
            a = record.values[node.inputs[0]]
            if treatment.rule is None:
                return Handed((op.pool.winners(a, record.values[i], flow.relevance),), {})
            nonnegative = self._is_nonnegative(node.inputs[0])
            # Padded by hand, perhaps, with what no maximum can be; an accelerator would have to stop for the answer.
            if not nonnegative and (a.device.type != "cpu" or a.amin() == -torch.inf):
                a = a.clamp(min=torch.finfo(a.dtype).min / 2**20)
            linear: LinearMap = (op.halves if treatment.halves else op.pool).average(a)
            return treatment.rule(linear, a, flow.whole, nonnegative=nonnegative, due=True)
        if isinstance(op, Mapped) and isinstance(treatment, Rule):
            return self._map(i, op, treatment, flow, record, leads[i])
        if type(op).hand is Operator.hand and record.shapes[i] == record.shapes[node.inputs[0]]:
            return Handed((flow.memory,), {})
        if isinstance(op, Product) and treatment == HALVES:
            op = replace(op, signals=(0, 1), halves=True)
        batch, r = record.shapes[0][0], flow.relevance
        return op.hand(r, self._inputs(node, record, r), lambda part: samples.summed(part, leads[i], batch))

    def _inputs(self, node: Node, record: Record, r: Tensor) -> list[Any]:
        """A node's inputs; of those whose values were not kept, only the shapes."""
        return [
            record.values[j] if j in record.values else r.new_empty(()).expand(record.shapes[j]) for j in node.inputs
        ]

    def _map(self, i: int, op: Mapped, rule: Rule, flow: Flow, record: Record, lead: int | None) -> Handed:
        """Lets a rule hand relevance through a linear map."""
        node = self.plan.graph.nodes[i]
        values = self._inputs(node, record, flow.memory)
        signals = op.signals if isinstance(op, Matrices) else (op.signal,)
        batch = record.shapes[0][0]
        handed: list[Tensor | None] = [None] * len(values)
        absorbed: dict[str, Tensor] = {}
        factor: Tensor | None = None
        for k in signals:
            j, a = node.inputs[k], values[k]
            norm = self.forward.norms.get(i)
            if norm is not None and self.plan.treatments[norm] == FOLD:
                linear = self.forward.fold(i)
            else:
                linear = op.map_of(k, *values) if isinstance(op, Matrices) else op.map(*values)
            alone = len(signals) == 1
            if isinstance(op, Reduction) and 0 in [axis % a.ndim for axis in op.axes]:
                result = _over_first(op, rule, a, flow.relevance, batch, lead)
            elif not samples.are_first(lead, record.shapes[i], batch) and _only_last(op, a):
                # The rule is to see the samples in front, as everywhere.
                share = flow.relevance if alone else flow.relevance / len(signals)
                share = torch.stack([samples.in_front(part, lead or samples.APART, batch) for part in share])
                in_front = samples.in_front(a, lead or samples.APART, batch)
                linear = op.map(in_front) if isinstance(op, Norm) else linear
                result = rule(linear, in_front, share, nonnegative=self._is_nonnegative(j))
                assert result.relevance[0] is not None
                result = Handed((samples.as_before(result.relevance[0], a.shape),), result.absorbed)
            else:
                y = record.values[i] if self.forward.divides_output(i) else None
                whole = flow.whole if alone else flow.relevance / len(signals)
                result = rule(linear, a, whole, nonnegative=self._is_nonnegative(j), y=y, due=alone)
                factor = result.factor
            handed[k] = result.relevance[0]
            for cause, amount in result.absorbed.items():
                absorbed[cause] = absorbed[cause] + amount if cause in absorbed else amount
        return Handed(tuple(handed), absorbed, factor=factor)

    def _is_nonnegative(self, i: int) -> bool:
        return self.plan.graph.nodes[i].nonnegative

    def _part(self, i: int, op: Sum, split: Split, flow: Flow, record: Record, lead: int | None) -> Handed:
        """Splits relevance among the branches of a sum; a constant is one more, with nobody behind it."""
        node, r = self.plan.graph.nodes[i], flow.memory
        takers = self.forward.takers(node, op, split)
        branches: list[Tensor] = []
        if i in self.forward.weighing:
            values: list[Any] = op.branches([record.values[j] for j in node.inputs])
            if op.constant is not None:
                values.append(torch.as_tensor(op.constant, dtype=r.dtype, device=r.device))
            branches = [values[b].to(r.dtype).expand(record.shapes[i]) for b in takers]
        nonnegative = [
            b < len(node.inputs) and op.factors[b] > 0 and self._is_nonnegative(node.inputs[b]) for b in takers
        ]
        batch = record.shapes[0][0]
        if samples.are_first(lead, record.shapes[i], batch):
            spare = [b < len(node.inputs) and node.inputs[b] in self.forward.spare for b in takers]
            whole = flow.whole if len(takers) > 1 else flow.relevance  # which passes as it is
            handed = split(branches, len(takers), whole, nonnegative, [*spare, flow.own], flow.signed)
        else:
            lead = lead or samples.APART
            branches = [samples.in_front(branch, lead, batch) for branch in branches]
            handed = split(
                branches,
                len(takers),
                torch.stack([samples.in_front(p, lead, batch) for p in flow.relevance]),
                nonnegative,
            )
            back = (None if h is None else samples.as_before(h, record.shapes[i]) for h in handed.relevance)
            handed = Handed(tuple(back), handed.absorbed)
        nothing: list[Tensor | None] = [None] * len(node.inputs)
        relevance, amounts, sizes = nothing.copy(), nothing.copy(), nothing.copy()
        absorbed = dict(handed.absorbed)
        unknown = (None,) * len(takers)
        for b, share, *sums in zip(
            takers, handed.relevance, handed.amounts or unknown, handed.sizes or unknown, strict=True
        ):
            if share is None:
                continue
            # What depends on nothing but shapes may be one for all samples, which could not be told apart there.
            if b == len(node.inputs) or isinstance(self.plan.graph.nodes[node.inputs[b]].operator, Constant):
                kept = samples.summed(share, lead, batch)
                absorbed["constant"] = absorbed["constant"] + kept if "constant" in absorbed else kept
                continue
            relevance[b] = reduced(share, record.shapes[node.inputs[b]])
            if relevance[b] is share:
                amounts[b], sizes[b] = sums
        return Handed(tuple(relevance), absorbed, tuple(amounts), tuple(sizes))


def _settle(flows: Iterable[Flow]) -> None:
    for flow in flows:
        flow.settle()


def _noted(ledger: Ledger, node: int, producer: int, share: Flow) -> bool:
    """Notes in the ledger what a node handed on, if that is known yet."""
    sums = share.sums
    if sums is not None:
        ledger.record(node, producer, *sums)
    return sums is not None


def _together(one: Tensor | None, two: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return one is not None and one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _check_one(graph: Graph, call: Call, known: int, other: int) -> None:
    """Refuses to add up the relevance of a module's several inputs."""
    if known != other:
        msg = (
            f"{call[0]} takes several inputs with relevance of their own ({graph.nodes[known].name} and "
            f"{graph.nodes[other].name}); ask for {call[0]}{OUTPUT}, or for the modules that those come from."
        )
        raise RelpropError(msg)


def _crossing(graph: Graph, call: Call) -> frozenset[tuple[int, int]]:
    """The edges that lead out of a call of a module, towards its inputs; or into it, at its output."""
    module = (call[0].removesuffix(OUTPUT), call[1])
    inside = graph.calls[module]
    if module == call:
        return frozenset((i, j) for i in inside for j in graph.nodes[i].inputs if j not in inside)
    output = concepts.find(graph, f"{module[0]}#{module[1]}")
    return frozenset((i, output) for i, node in enumerate(graph) if i not in inside and output in node.inputs)


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
