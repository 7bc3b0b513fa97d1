"""Residual blocks: what a graph says about its nodes.

A block ends at a sum that joins branches, its merge, and begins where they forked. Merges are numbered in the order in
which they are computed. None of this needs to know an architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from relprop import operators
from relprop.embeddings import Lookup
from relprop.gates import Product
from relprop.graph import Graph, Node
from relprop.mapped import AveragePool, BatchNorm, Linear, Mapped, Reduction
from relprop.operators import Elementwise, Operator, Sum
from relprop.shapes import Joined
from relprop.upsampling import Interpolation


def annotated(nodes: list[Node]) -> list[Node]:
    """Finds signs, first maps, foldable batch norms, merges and the residual blocks that they close."""
    graph = Graph(tuple(nodes))
    consumers, live = graph.consumers(), graph.reached()
    before: list[int] = []  # ancestors of each node and itself, as bits
    weighted = merges = 0
    facts: list[Node] = []
    regions: list[tuple[int, int, int]] = []  # size, number and nodes of every block
    number: dict[int, int] = {}
    for i, node in enumerate(nodes):
        op = node.operator
        ancestors = _union(before[j] for j in node.inputs)
        before.append(ancestors | 1 << i)
        changes: dict[str, Any] = {
            "nonnegative": _nonnegative(op, [facts[j] for j in node.inputs]),
            "after": max((number[j] for j in _bits(ancestors & merges)), default=0),
        }
        if isinstance(op, Mapped) and op.weighted:
            changes["first"] = not ancestors & weighted
            weighted |= 1 << i
        if isinstance(op, Lookup):  # the first map of a text: what comes after it has not seen the input itself
            weighted |= 1 << i
        if isinstance(op, BatchNorm):
            j = node.inputs[0]
            changes["folds"] = j if len(consumers[j]) == 1 and _can_fold(facts[j].operator, op) else None
        if isinstance(op, Sum) and len(op.inputs) > 1 and i in live:
            number[i] = len(number) + 1
            merges |= 1 << i
            own, region = _branches(node, before)
            done = [(bits & weighted).bit_count() for bits in own]
            changes |= {
                "merge": number[i],
                "main": max(range(len(own)), key=lambda b: (done[b], own[b].bit_count())),
                "identities": frozenset(
                    b for b, bits in enumerate(own) if all(_is_identity(facts[j]) for j in _bits(bits))
                ),
            }
            regions.append((region.bit_count(), number[i], region | 1 << i))
        facts.append(replace(node, **changes))
    regions.sort()
    blocks = [next((k for _, k, region in regions if region >> i & 1), None) for i in range(len(nodes))]
    return [replace(node, block=block) for node, block in zip(facts, blocks, strict=True)]


def _branches(node: Node, before: Sequence[int]) -> tuple[list[int], int]:
    """What each branch of a merge has to itself, and all that lies between the fork and the merge."""
    paths = [before[j] for j in node.inputs]
    common = paths[0]
    for path in paths[1:]:
        common &= path
    own = [path & ~_union(p for q, p in enumerate(paths) if q != b) for b, path in enumerate(paths)]
    return own, _union(paths) & ~common


def _union(bits: Iterable[int]) -> int:
    result = 0
    for b in bits:
        result |= b
    return result


def _bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _can_fold(before: Operator, norm: BatchNorm) -> bool:
    """Whether a batch norm's channels are the outputs of the linear map before it."""
    return isinstance(before, Linear) and before.linear.weight.shape[0] == len(norm.scale)


def _is_identity(node: Node) -> bool:
    return isinstance(node.operator, Elementwise) and node.operator.identity


def _nonnegative(op: Operator, inputs: Sequence[Node]) -> bool:
    """Whether an operator's values are never negative, from what is known of its inputs."""
    if isinstance(op, Elementwise) and op.nonnegative is not None:
        return op.nonnegative
    if isinstance(op, Sum):
        constant = op.constant is None or bool(torch.as_tensor(op.constant).min() >= 0)
        return constant and all(f >= 0 for f in op.factors) and all(node.nonnegative for node in inputs)
    if isinstance(op, Product):
        return all(node.nonnegative for node in inputs) and len(inputs) > 1
    if isinstance(op, Joined):
        signs = [p.min() >= 0 for p in op.parts if isinstance(p, Tensor) and p.numel()]
        return all(signs) and all(node.nonnegative for node in inputs)
    keeps = (
        Elementwise,
        operators.Reshape,
        operators.MaxPool,
        AveragePool,
        Reduction,
        Interpolation,
    )
    return isinstance(op, keeps) and inputs[0].nonnegative
