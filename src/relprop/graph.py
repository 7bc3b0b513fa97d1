"""The graph: a model as a list of nodes, from input to output."""

from __future__ import annotations

from collections.abc import Container, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from relprop.operators import Operator, Ref, Unknown

Call = tuple[str, int]
"""A call of a module: its qualified name, and how many calls of it came before."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of the model.

    Attributes:
        name: Unique name: the module's, with ``#1`` and so on for later calls, or the enclosing module's and the
            operation's.
        operator: What it computes.
        kinds: The types of the modules that it stands in, from the outermost to its own.
        calls: The module calls that it stands in, from the outermost to its own.
        source: Where in the model's code it was written.
        nonnegative: Whether its values are known to be never negative.
        after: How many merges lie before it.
        block: The residual block that it stands in, by the number of its merge, from 1; None outside of all.
        merge: The number of the merge that it is, or None.
        main: For a merge, the branch that has done most.
        identities: For a merge, the branches that are identity skips.
        first: Whether it is a first linear map: a convolution or matrix with none before it.
        folds: For a batch norm, the linear map before it into which it can be folded.
    """

    name: str
    operator: Operator
    kinds: tuple[type[nn.Module], ...]
    calls: tuple[Call, ...]
    source: str
    nonnegative: bool = False
    after: int = 0
    block: int | None = None
    merge: int | None = None
    main: int = 0
    identities: frozenset[int] = frozenset()
    first: bool = False
    folds: int | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The nodes whose values it takes."""
        return tuple(ref.node for ref in self.operator.inputs)


@dataclass(frozen=True, eq=False)
class Graph:
    """A model as nodes in the order in which they are computed; the first are the inputs, the last one the output.

    Attributes:
        nodes: The nodes.
        shape: The shapes of the inputs that it is good for, one each; None for any.
        inputs: How many inputs there are.
    """

    nodes: tuple[Node, ...]
    shape: tuple[tuple[int, ...], ...] | None = None
    inputs: int = 1

    def __iter__(self) -> Iterator[Node]:
        """The nodes, from input to output."""
        return iter(self.nodes)

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def merges(self) -> int:
        """How many sums join branches."""
        return sum(node.merge is not None for node in self.nodes)

    @cached_property
    def calls(self) -> dict[Call, frozenset[int]]:
        """For every call of a module, the nodes inside it."""
        inside: dict[Call, set[int]] = {}
        for i, node in enumerate(self.nodes):
            for call in node.calls:
                inside.setdefault(call, set()).add(i)
        return {call: frozenset(nodes) for call, nodes in inside.items()}

    def consumers(self) -> list[list[int]]:
        """For every node, the nodes that take its value, once for each time they do."""
        consumers: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for producer in node.inputs:
                consumers[producer].append(i)
        return consumers

    def reached(self, every: Container[int] = ()) -> frozenset[int]:
        """The nodes that relevance can reach, from the output on.

        Args:
            every: Nodes that hand relevance to all of their inputs, not only to those that they usually do.
        """
        found = {len(self.nodes) - 1}
        for i in range(len(self.nodes) - 1, self.inputs - 1, -1):
            if i in found:
                inputs = self.nodes[i].inputs
                found.update(inputs if i in every else (inputs[k] for k in self.nodes[i].operator.heirs))
        return frozenset(found)

    def unknown(self) -> list[Node]:
        """The nodes without a rule that relevance can reach."""
        return [self.nodes[i] for i in sorted(self.reached()) if isinstance(self.nodes[i].operator, Unknown)]

    def until(self, last: int) -> tuple[Graph, tuple[int, ...]]:
        """The part of the graph that a node's value depends on, inputs included.

        Returns:
            A graph whose output is that node, and the numbers that its nodes have in this one.
        """
        needed = {*range(self.inputs), last}
        for i in range(last, self.inputs - 1, -1):
            if i in needed:
                needed.update(self.nodes[i].inputs)
        kept = tuple(sorted(needed))
        new = {old: i for i, old in enumerate(kept)}
        nodes = []
        for old in kept:
            node = self.nodes[old]
            inputs = tuple(Ref(new[j]) for j in node.inputs)
            if inputs != node.operator.inputs:
                operator = copy(node.operator)
                operator.inputs = inputs
                folds = None if node.folds is None else new[node.folds]
                node = replace(node, operator=operator, folds=folds)
            nodes.append(node)
        return Graph(tuple(nodes), self.shape, self.inputs), kept
