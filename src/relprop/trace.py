"""The graph: a model as a list of nodes, from input to output.

``torch.fx`` records what the model's ``forward`` does with one symbolic input, so nothing here knows an architecture:
sums are sums wherever they are written, a module that is called three times gives three nodes, and code that runs in
place is rewritten to its safe twin. On top of that the graph knows its residual blocks: which sums join a skip
connection with its block, in which order.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from relprop import operators
from relprop.errors import RelpropError
from relprop.operators import ARITHMETIC, SHAPES, BatchNorm, Elementwise, Linear, Mapped, Operator, Ref, Sum

_TRACING = threading.RLock()
"""fx traces one model at a time in a process."""

Call = tuple[str, int]
"""A call of a module: its qualified name, and how many calls of it came before."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of the model.

    Attributes:
        name: Unique name: the module's, with ``#1`` and so on for later calls, or the enclosing module's and the
            operation's.
        operator: What it computes.
        module: The module that does it, or None for a function.
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
    module: nn.Module | None
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
    """A model as nodes in the order in which they are computed; node 0 is the input, the last one the output."""

    nodes: tuple[Node, ...]

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

    @property
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


def trace(model: nn.Module) -> Graph:
    """Traces a model of one input.

    Args:
        model: The model, in evaluation mode.

    Returns:
        Its graph.

    Raises:
        RelpropError: If its code cannot be traced.
    """
    tracer = _Tracer()
    defaults = {
        name: p.default
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    with _TRACING:
        try:
            recorded = tracer.trace(model, concrete_args=defaults or None)
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            msg = (
                f"{type(model).__name__} cannot be traced by torch.fx ({type(error).__name__}: {reason}); "
                "code that branches on values, or builds modules as it runs, has to move out of forward."
            )
            raise RelpropError(msg) from error
    nodes = _nodes(model, recorded, tracer)
    return Graph(tuple(_residual_blocks(_flat_sums(nodes))))


class _Tracer(fx.Tracer):
    """Records, with each node, the calls of modules around it and its line; leaves other threads alone."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type] # a tuple of none is one, too
        self.record_stack_traces = True
        self.around: dict[fx.Node, tuple[Call, ...]] = {}
        self._stack: tuple[Call, ...] = ()
        self._counts: dict[str, int] = {}
        # While fx traces, it looks at every call of every module in the process. Those of other threads are none of
        # its business.
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        outside = self._stack
        self._stack = (*outside, (name, count))
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._stack = outside

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in operators.TABLE or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.around[node] = self._stack
        return node


# -- from fx to nodes --


def _nodes(model: nn.Module, recorded: fx.Graph, tracer: _Tracer) -> list[Node]:
    """Turns what fx recorded into nodes: constants evaluated, in-place operations made safe, dead code left out."""
    # fx asserts that arguments with defaults keep them; what only serves that is left out.
    asserts: set[fx.Node] = set()
    for n in reversed(recorded.nodes):
        if getattr(n.target, "__name__", "").startswith("_assert") or (n.users and n.users.keys() <= asserts):
            asserts.add(n)
    inputs = [n for n in recorded.nodes if n.op == "placeholder" and n not in asserts and n.users]
    result = next(n for n in recorded.nodes if n.op == "output").args[0]
    if len(inputs) > 1:
        msg = f"{type(model).__name__} takes {len(inputs)} inputs; relprop explains models of one tensor."
        raise RelpropError(msg)
    if not isinstance(result, fx.Node):
        msg = (
            f"{type(model).__name__} returns a {type(result).__name__}; relprop explains models that return one "
            "tensor (batch, classes)."
        )
        raise RelpropError(msg)

    nodes: list[Node] = []
    value: dict[fx.Node, Any] = {}  # what stands for an fx node now: a Ref, or a constant
    names: dict[str, int] = {}

    def add(name: str, operator: Operator, n: fx.Node, module: nn.Module | None = None) -> Ref:
        count = names.get(name, 0)
        names[name] = count + 1
        nodes.append(Node(f"{name}#{count}" if count else name, operator, module, tracer.around.get(n, ()), _source(n)))
        return Ref(len(nodes) - 1)

    for n in recorded.nodes:
        if n.op == "output" or n in asserts:
            continue
        if n.op == "placeholder":
            value[n] = add("input", Operator("input", ()), n) if n in inputs else None
            continue
        if n.op == "get_attr":
            value[n] = _attribute(model, str(n.target))
            continue
        module = model.get_submodule(str(n.target)) if n.op == "call_module" else None
        target = type(module) if module is not None else n.target
        args = fx.map_arg(n.args, value.__getitem__)
        kwargs = fx.map_arg(n.kwargs, value.__getitem__)
        refs = [value[a] for a in n.all_input_nodes if isinstance(value[a], Ref)]
        if not refs:
            value[n] = _evaluate(n, module, args, kwargs)
            continue
        operator = _operator(target, module, args, kwargs, n, nodes)
        owner = next((call[0] for call in reversed(tracer.around.get(n, ()))), "")
        name = str(n.target) if module is not None else f"{owner}.{operator.label}".lstrip(".")
        value[n] = add(name, operator, n, module)
        mutated = _mutated(n, module)
        if mutated is not None and isinstance(value[mutated], Ref):
            # Whoever reads that tensor from here on reads the new value: the one name stands for the other.
            aliases = _aliases(nodes, value[mutated])
            value.update({key: value[n] for key, old in value.items() if isinstance(old, Ref) and old in aliases})
    return _reachable(nodes, value[result])


def _operator(
    target: Any, module: nn.Module | None, args: Any, kwargs: Any, n: fx.Node, nodes: Sequence[Node]
) -> Operator:
    inputs = operators.refs((args, kwargs))
    scalars = all(isinstance(nodes[ref.node].operator, operators.Scalar) for ref in inputs)
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    if target in SHAPES or (scalars and target in ARITHMETIC):
        return operators.Scalar("shape", tuple(inputs), operators.bound(function, args, kwargs))
    builder = operators.find(target)
    label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if builder is None:
        run = module if module is not None else function
        return operators.Unknown(label, tuple(inputs), operators.bound(run, args, kwargs))
    try:
        return builder(*([module] if module is not None else []), *args, **kwargs)
    except RelpropError as error:
        where = str(n.target) if module is not None else label
        msg = f"{where} ({_source(n)}): {error}."
        raise RelpropError(msg) from None


def _attribute(model: nn.Module, path: str) -> Any:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return value.detach() if isinstance(value, Tensor) else value


def _evaluate(n: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    """Computes a node that depends on no input."""
    with torch.no_grad():
        if module is not None:
            return module(*args, **kwargs)
        if n.op == "call_method":
            return getattr(args[0], str(n.target))(*args[1:], **kwargs)
        return n.target(*args, **kwargs)  # type: ignore[operator] # of a call_function node, it is a function


def _mutated(n: fx.Node, module: nn.Module | None) -> fx.Node | None:
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


_IN_PLACE_OPERATORS = {getattr(__import__("operator"), name) for name in ("iadd", "isub", "imul", "itruediv")}
_INPLACE_ARGUMENT = {"relu": 1, "relu6": 1, "leaky_relu": 2, "dropout": 3, "dropout2d": 3}
"""Where ``inplace`` stands among the arguments of functions that have it."""


def _aliases(nodes: Sequence[Node], ref: Ref) -> set[Ref]:
    """Names of the same tensor: through operations that return just what they are given."""

    def root(i: int) -> int:
        op = nodes[i].operator
        return root(op.inputs[0].node) if isinstance(op, Elementwise) and op.identity else i

    return {Ref(i) for i in range(len(nodes)) if root(i) == root(ref.node)}


def _source(n: fx.Node) -> str:
    """File, line and text of the code that a node comes from."""
    lines = (n.stack_trace or "").splitlines()
    frames = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    # torch's own frames, and ours, stand around the line of the model that did it.
    foreign = [i for i in frames if not any(place in lines[i] for place in _NOT_THE_MODEL)]
    if not foreign:
        return "unknown line"
    file, line = lines[foreign[-1]].split('"')[1], lines[foreign[-1]].split("line ")[1].split(",")[0]
    text = lines[foreign[-1] + 1].strip() if foreign[-1] + 1 not in {*frames, len(lines)} else ""
    return f"{Path(file).name}:{line}: {text}".rstrip(": ")


_NOT_THE_MODEL = (f"{Path(torch.__file__).parent}{os.sep}", __file__)


def _reachable(nodes: Sequence[Node], output: Any) -> list[Node]:
    """Leaves out what the output does not depend on."""
    if not isinstance(output, Ref):
        msg = "The model's output does not depend on its input, so there is nothing to explain."
        raise RelpropError(msg)
    needed = {output.node}
    for i in range(output.node, -1, -1):
        if i in needed:
            needed.update(nodes[i].inputs)
    if 0 not in needed:
        return _reachable(nodes, None)
    return _renumbered(nodes, sorted(needed))


def _renumbered(nodes: Sequence[Node], kept: Sequence[int]) -> list[Node]:
    new = {old: Ref(i) for i, old in enumerate(kept)}
    for old in kept:
        operator = nodes[old].operator
        operator.inputs = tuple(new[ref.node] for ref in operator.inputs)
    return [nodes[old] for old in kept]


def _flat_sums(nodes: list[Node]) -> list[Node]:
    """Makes one sum of several terms out of a chain of sums of two."""
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
        node.operator.__dict__.update(operators._sum([*terms, *((c, 1.0) for c in constants)]).__dict__)
    return _renumbered(nodes, [i for i in range(len(nodes)) if i not in inlined])


def _together(inner: Node, outer: Node) -> bool:
    """Whether two sums were written in one module, so that nobody can ask for the relevance between them."""
    return inner.calls == outer.calls


# -- what the graph says about its nodes --


def _residual_blocks(nodes: list[Node]) -> list[Node]:
    """Finds signs, first maps, foldable batch norms, merges and the residual blocks that they close."""
    consumers = Graph(tuple(nodes)).consumers()
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
        if isinstance(op, BatchNorm):
            j = node.inputs[0]
            alone = isinstance(facts[j].operator, Linear) and len(consumers[j]) == 1
            changes["folds"] = j if alone else None
        if isinstance(op, Sum) and len(op.inputs) > 1:
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


def _is_identity(node: Node) -> bool:
    return isinstance(node.operator, Elementwise) and node.operator.identity


def _nonnegative(op: Operator, inputs: Sequence[Node]) -> bool:
    """Whether an operator's values are never negative, from what is known of its inputs."""
    if isinstance(op, Elementwise) and op.nonnegative is not None:
        return op.nonnegative
    if isinstance(op, Sum):
        constant = op.constant is None or bool(torch.as_tensor(op.constant).min() >= 0)
        return constant and all(f >= 0 for f in op.factors) and all(node.nonnegative for node in inputs)
    keeps = (Elementwise, operators.Reshape, operators.MaxPool, operators.AveragePool, operators.Reduction)
    return isinstance(op, keeps) and inputs[0].nonnegative
