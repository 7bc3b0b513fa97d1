"""Recordings: from what a tracer has written down to a graph.

Constants are evaluated, code that runs in place is rewritten to its safe twin, and sums of sums become one.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from relprop import gates, operators, shapes, vocabulary
from relprop.blocks import annotated
from relprop.errors import RelpropError
from relprop.forms import Form
from relprop.graph import Call, Graph, Node
from relprop.lines import source
from relprop.operators import ARITHMETIC, SHAPES, Elementwise, Operator, Ref, Sum


@dataclass
class Recording:
    """What a tracer has written down.

    Attributes:
        graph: The calls, in torch.fx' own form.
        around: For each of them, the calls of modules that it stands in.
        kinds: The types of those modules.
        constants: Values of placeholders that are no inputs.
        names: Names of calls that are all that a module does.
    """

    graph: fx.Graph
    around: Mapping[fx.Node, tuple[Call, ...]]
    kinds: Mapping[str, type[nn.Module]]
    constants: Mapping[fx.Node, Any]
    names: Mapping[fx.Node, str]


def made(model: nn.Module, recording: Recording, form: Form, tensors: Sequence[Tensor] | None) -> Graph:
    """The graph of what was recorded of a model, for inputs shaped like these if there are any."""
    nodes = _flat_sums(_nodes(model, recording, form))
    shape = None if tensors is None else tuple(tuple(x.shape) for x in tensors)
    return Graph(tuple(annotated(nodes)), shape, len(form.names))


def _nodes(model: nn.Module, recording: Recording, form: Form) -> list[Node]:
    """Turns what was recorded into nodes: constants evaluated, in-place operations made safe, dead code left out."""
    result = next(n for n in recording.graph.nodes if n.op == "output").args[0]
    nodes: list[Node] = []
    value: dict[fx.Node, Any] = {}  # what stands for an fx node now: a Ref, or a constant
    names: dict[str, int] = {}

    def add(name: str, operation: Operator, n: fx.Node) -> Ref:
        count = names.get(name, 0)
        names[name] = count + 1
        calls = recording.around.get(n, ())
        kinds = tuple(recording.kinds[call] for call, _ in calls)
        nodes.append(Node(f"{name}#{count}" if count else name, operation, kinds, calls, source(n)))
        return Ref(len(nodes) - 1)

    labels = iter(form.names)
    for n in recording.graph.nodes:
        if n.op == "output":
            continue
        if n in recording.constants:
            value[n] = recording.constants[n]
            continue
        if n.op == "placeholder":
            label = next(labels)
            value[n] = add("input" if len(form.names) == 1 else f"input.{label}", Operator("input", ()), n)
            continue
        if n.op == "get_attr":
            value[n] = attribute(model, str(n.target))
            continue
        module = model.get_submodule(str(n.target)) if n.op == "call_module" else None
        target = type(module) if module is not None else n.target
        args = fx.map_arg(n.args, value.__getitem__)
        kwargs = fx.map_arg(n.kwargs, value.__getitem__)
        refs = [value[a] for a in n.all_input_nodes if isinstance(value[a], Ref)]
        if not refs:
            value[n] = evaluate(n, module, args, kwargs)
            continue
        operation = _operator(target, module, args, kwargs, n, nodes)
        # One of the things that a call returns belongs where that call was made.
        of_several = target is operator.getitem and isinstance(nodes[refs[0].node].operator, operators.Several)
        home = n.all_input_nodes[0] if of_several else n
        owner = next((call[0] for call in reversed(recording.around.get(home, ()))), "")
        own = str(n.target).replace("._orig_mod", "") if module is not None else recording.names.get(n)
        name = own or f"{owner}.{operation.label}".lstrip(".")
        value[n] = add(name, operation, home)
        written = mutated(n, module)
        if written is not None and isinstance(value[written], Ref) and type(operation) is not operators.Scalar:
            # Whoever reads that tensor from here on reads the new value: the one name stands for the other.
            aliases = _aliases(nodes, value[written])
            value.update({key: value[n] for key, old in value.items() if isinstance(old, Ref) and old in aliases})
    return _reachable(nodes, value.get(result) if isinstance(result, fx.Node) else None, len(form.names))


def _operator(
    target: Any, module: nn.Module | None, args: Any, kwargs: Any, n: fx.Node, nodes: Sequence[Node]
) -> Operator:
    inputs = operators.refs((args, kwargs))
    known = [nodes[ref.node].operator for ref in inputs]
    numbers = [isinstance(op, operators.Scalar) for op in known]
    function: Any = getattr(Tensor, target, None) if isinstance(target, str) else target
    if target is getattr:
        target, args, function = args[1], args[:1], operator.attrgetter(args[1])
    function = shapes.assigned if target is operator.setitem else function
    call = operators.bound(function if module is None else module, args, kwargs)
    if target is operator.getitem and isinstance(known[0], operators.Several) and isinstance(args[1], int):
        return known[0].part(args[1])
    plain = all(numbers) and not any(isinstance(op, operators.Constant) for op in known)
    if target in SHAPES or (plain and target in ARITHMETIC):
        return operators.Scalar("shape", tuple(inputs), call)
    label = target if isinstance(target, str) else getattr(target, "__name__", str(target)).partition(".")[0]
    if all(numbers) or target in operators.EMPTY:
        return operators.Constant(label.strip("_"), tuple(inputs), call)
    if "input" in kwargs:  # torch's own name for the first argument
        args, kwargs = (kwargs["input"], *args), {k: v for k, v in kwargs.items() if k != "input"}
    key = operators.find(target)
    unknown = operators.Unknown(label, tuple(inputs), call, is_wrapped(target))
    only_numbers = [type(op) is operators.Scalar for op in known]
    if key is None or (any(only_numbers) and key not in operators.NUMBERS):
        return unknown
    try:
        return operators.TABLE[key](*([module] if module is not None else []), *args, **kwargs)
    except (TypeError, StopIteration):  # called in a way that the vocabulary does not know
        return unknown
    except RelpropError as error:
        where = str(n.target) if module is not None else label
        msg = f"{where} ({source(n)}): {error}."
        raise RelpropError(msg) from None


def is_wrapped(target: Any) -> bool:
    """Whether a function is a model's own, which fx was told (``torch.fx.wrap``) not to look into."""
    home = (getattr(target, "__module__", None) or "").partition(".")[0]
    return (
        inspect.isfunction(target) and home not in ("torch", "_operator", "builtins") and operators.find(target) is None
    )


def attribute(model: nn.Module, path: str) -> Any:
    """What lies at a dotted path of a model."""
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return value.detach() if isinstance(value, Tensor) else value


def evaluate(n: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    """Computes a node that depends on no input."""
    with torch.no_grad():
        if module is not None:
            return module(*args, **kwargs)
        if n.op == "call_method":
            return getattr(args[0], str(n.target))(*args[1:], **kwargs)
        return n.target(*args, **kwargs)  # type: ignore[operator] # of a call_function node, it is a function


def mutated(n: fx.Node, module: nn.Module | None) -> fx.Node | None:
    """The fx node whose tensor this one writes into, if it does."""
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    in_place = (
        bool(getattr(module, "inplace", False))
        or bool(n.kwargs.get("inplace", False))
        or (n.op != "call_module" and name.endswith("_") and not name.endswith("__"))
        or (n.op == "call_function" and n.target in _IN_PLACE_OPERATORS)
        or (
            n.op == "call_function"
            and name in _INPLACE_ARGUMENT
            and len(n.args) > _INPLACE_ARGUMENT[name]
            and n.args[_INPLACE_ARGUMENT[name]] is True
        )
    )
    return n.all_input_nodes[0] if in_place and n.all_input_nodes else None


_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}
_INPLACE_ARGUMENT = {"relu": 1, "relu6": 1, "leaky_relu": 2, "dropout": 3, "dropout2d": 3}
"""Where ``inplace`` stands among the arguments of functions that have it."""


def _aliases(nodes: Sequence[Node], ref: Ref) -> set[Ref]:
    """Names of the same tensor: through operations that return just what they are given."""

    def root(i: int) -> int:
        op = nodes[i].operator
        return root(op.inputs[0].node) if isinstance(op, Elementwise) and op.alias else i

    return {Ref(i) for i in range(len(nodes)) if root(i) == root(ref.node)}


def _reachable(nodes: Sequence[Node], output: Any, inputs: int) -> list[Node]:
    """Leaves out what the output does not depend on, but inputs."""
    if not isinstance(output, Ref):
        msg = "The model's output does not depend on its input, so there is nothing to explain."
        raise RelpropError(msg)
    if output.node < inputs:  # a model that returns an input, which need not be the last one
        nodes = [*nodes, replace(nodes[output.node], name="output", operator=vocabulary.identity(output))]
        output = Ref(len(nodes) - 1)
    needed = {output.node}
    for i in range(output.node, -1, -1):
        if i in needed:
            needed.update(nodes[i].inputs)
    if needed.isdisjoint(range(inputs)):
        return _reachable(nodes, None, inputs)
    return _renumbered(nodes, sorted({*needed, *range(inputs)}))


def _renumbered(nodes: Sequence[Node], kept: Sequence[int]) -> list[Node]:
    new = {old: Ref(i) for i, old in enumerate(kept)}
    for old in kept:
        nodes[old].operator.inputs = tuple(new[ref.node] for ref in nodes[old].operator.inputs)
    return [nodes[old] for old in kept]


def _flat_sums(nodes: list[Node]) -> list[Node]:
    """Makes one sum of several terms out of a chain of sums of two."""
    gates.decide(nodes)
    consumers = Graph(tuple(nodes)).consumers()
    inlined: set[int] = set()
    for i, node in enumerate(nodes):
        if not isinstance(node.operator, Sum):
            continue
        terms: list[tuple[Any, float]] = []
        constants = [] if node.operator.constant is None else [node.operator.constant]
        for ref, factor in zip(node.operator.inputs, node.operator.factors, strict=True):
            inner = nodes[ref.node].operator
            if isinstance(inner, Sum) and consumers[ref.node] == [i] and _together(nodes[ref.node], node):
                inlined.add(ref.node)
                terms += [(r, f * factor) for r, f in zip(inner.inputs, inner.factors, strict=True)]
                constants += [] if inner.constant is None else [inner.constant * factor]
            else:
                terms.append((ref, factor))
        node.operator.__dict__.update(vocabulary.added([*terms, *((c, 1.0) for c in constants)]).__dict__)
    return _renumbered(nodes, [i for i in range(len(nodes)) if i not in inlined])


def _together(inner: Node, outer: Node) -> bool:
    """Whether two sums were written in one module, so that nobody can ask for the relevance between them."""
    return inner.calls == outer.calls
