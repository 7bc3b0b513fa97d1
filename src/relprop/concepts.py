"""Concepts: starting at a hidden layer instead of a class.

What speaks for a channel, a neuron or a region of a layer is asked like what speaks for a class: relevance starts at
the output of that layer, and the graph ends there (concept relevance propagation; Achtibat et al., 2023).

References:
    Achtibat et al., 2023: From Attribution Maps to Human-Understandable Explanations through Concept Relevance
        Propagation.
"""

from __future__ import annotations

from difflib import get_close_matches

from torch import Tensor

from relprop.convolution import Convolution
from relprop.errors import RelpropError
from relprop.graph import Graph
from relprop.mapped import BatchNorm, Linear
from relprop.maps import Dense
from relprop.operators import Elementwise, MaxPool, Scalar, Sum


def find(graph: Graph, layer: str) -> int:
    """The node whose value is a layer's output.

    Args:
        graph: The model's graph.
        layer: The name of a module or of a node, with ``#1`` and so on for later calls.

    Raises:
        RelpropError: If there is no such layer, or it has no output, or several.
    """
    name, _, count = str(layer).partition("#")
    inside = graph.calls.get((name, int(count) if count.isdigit() else 0)) if isinstance(layer, str) else None
    if inside is None:
        found = {i for i, node in enumerate(graph) if node.name == layer}
    else:
        taken = {j for i, node in enumerate(graph) if i not in inside for j in node.inputs}
        found = {i for i in inside if i in taken or i == len(graph) - 1}
    tensors = [i for i in found if type(graph.nodes[i].operator) is not Scalar and i >= graph.inputs]
    if len(tensors) == 1:
        return tensors[0]
    if tensors:
        there = ", ".join(graph.nodes[i].name for i in sorted(tensors))
        msg = f"The layer {layer!r} has several outputs; name the node of one of them: {there}."
        raise RelpropError(msg)
    names = sorted({*(name for name, _ in graph.calls), *(node.name for node in graph.nodes[graph.inputs :])})
    near = get_close_matches(str(layer), names, 3)
    hint = f"; the nearest names are {', '.join(near)}" if near else ""
    msg = f"There is no layer {layer!r} to start at{hint}."
    raise RelpropError(msg)


def axis(graph: Graph, axes: int) -> int | None:
    """Along which axis the channels of a graph's output lie; None where nothing tells.

    They are where the last linear map has put them: a convolution second, a matrix last.
    """
    i = len(graph) - 1
    while axes > 2:
        op = graph.nodes[i].operator
        if isinstance(op, Linear):
            return 1 if isinstance(op.linear, Convolution) else axes - 1 if isinstance(op.linear, Dense) else None
        if isinstance(op, BatchNorm | MaxPool) or op.label.startswith(("conv", "avg_pool", "group_norm")):
            return 1
        if op.label in ("layer_norm", "rms_norm", "embedding"):
            return axes - 1
        if not isinstance(op, Elementwise | Sum) or not op.inputs:
            return None
        i = op.inputs[0].node
    return 1


def strongest(output: Tensor) -> Tensor:
    """The channel of each sample that is most active, all places together."""
    return output.flatten(2).sum(2).argmax(1) if output.ndim > 2 else output.argmax(1)
