"""Tracing: from a model to its graph.

``torch.fx`` records what the model's ``forward`` does with one symbolic input, so nothing here knows an architecture:
sums are sums wherever they are written, a module that is called three times gives three nodes, and code that runs in
place is rewritten to its safe twin.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from relprop import (
    activations,
    attention,
    embeddings,
    forms,
    gates,
    hooks,
    norms,
    operators,
    recurrent,
    shapes,
    upsampling,
    vocabulary,
)
from relprop.blocks import annotated
from relprop.errors import RelpropError
from relprop.forms import Form
from relprop.graph import Call, Graph, Node
from relprop.operators import ARITHMETIC, SHAPES, Elementwise, Operator, Ref, Sum
from relprop.state import undisturbed

FAMILIES = (vocabulary, activations, shapes, gates, norms, attention, recurrent, upsampling, embeddings)
"""The rooms that register operators: all of torch's words that are known."""

TRACING = threading.RLock()
"""fx traces one model at a time in a process."""


def trace(
    model: nn.Module, form: Form | None = None, tensors: Sequence[Tensor] | None = None, *, hooked: bool = False
) -> Graph:
    """Traces a model.

    Args:
        model: The model, in evaluation mode.
        form: How it is called; with one tensor, if not told.
        tensors: Inputs, for code that cannot be traced without knowing shapes; the graph is then good for theirs only.
        hooked: Whether the user's hooks on its modules are part of it.

    Returns:
        Its graph.

    Raises:
        RelpropError: If its code cannot be traced.
    """
    form = form or forms.plain(model)
    tracer = Tracer(form, hooked) if tensors is None else ShapedTracer(form, hooked, model, tensors)
    # Tracing runs the model's own code, which may store what it computes on the model, or draw at random.
    with TRACING, undisturbed(model):
        try:
            recorded = tracer.trace(model)
        except RelpropError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            msg = (
                f"{type(model).__name__} cannot be traced by torch.fx ({type(error).__name__}: {reason}); "
                "code that branches on values, or builds modules as it runs, has to move out of forward."
            )
            raise TraceError(msg) from error
        return made(model, Recording(recorded, tracer.around, tracer.kinds, {}, {}), form, tensors)


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


class TraceError(RelpropError):
    """A model whose code cannot be followed, in this way at least."""


class _Proxy(fx.Proxy):
    """A symbolic value that tells ``h += y``, which writes into ``h``, from ``h = h + y``."""

    def __getattr__(self, name: str) -> Any:
        if name in ("T", "mT", "data"):  # written down here, where it is read, and not where it is used
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class Tracer(fx.Tracer):
    """Records, with each node, the calls of modules around it and its line; leaves other threads alone."""

    def __init__(self, form: Form | None = None, hooked: bool = False) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type] # a tuple of none is one, too
        self._form, self._hooked = form, hooked
        self._preparing = False
        self.around: dict[fx.Node, tuple[Call, ...]] = {}
        self._stack: tuple[Call, ...] = ()
        self._counts: dict[str, int] = {}
        self.kinds: dict[str, type[nn.Module]] = {}
        # While fx traces, it looks at every call of every module in the process. Those of other threads are none of
        # its business.
        self._thread = threading.get_ident()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:  # noqa: ARG002 - fx's
        """Calls the model in its form, with symbols for the tensors, and takes what is meant of what it returns."""
        root = self.root
        form = self._form or forms.plain(root)
        symbols = [self.create_proxy("placeholder", name, (), {}) for name in form.names]

        def run(*values: Any) -> Any:
            return form.answer(form.call(partial(hooks.call, root, root.forward, hooked=self._hooked), values))

        return run, symbols

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        m = getattr(m, "_orig_mod", m)  # what torch.compile has compiled
        name = self.path_of_module(m).replace("._orig_mod", "")
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        self.kinds[name] = type(m)
        outside = self._stack
        self._stack = (*outside, (name, count))
        try:
            self._preparing = True
            hooks.prepare(m, args)
            self._preparing = False

            def inner(*args: Any, **kwargs: Any) -> Any:
                if type(m) in operators.REWRITES:
                    return operators.REWRITES[type(m)](m, *args, **kwargs)
                return super(Tracer, self).call_module(m, m.forward, args, kwargs)

            return hooks.call(m, inner, *args, hooked=self._hooked, **kwargs)
        finally:
            self._stack = outside
            self._preparing = False

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind in ("call_function", "call_method") and target in operators.REWRITES:
            return operators.REWRITES[target](*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *rest, **options)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self._preparing or threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in operators.TABLE or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.around[node] = self._stack
        node.stack_trace = _line()  # fx would do it, but has to load torch's compiler for that
        return node


class _ShapedProxy(_Proxy):
    """A symbolic tensor that knows what it stands for: shapes are plain numbers, and code may branch on them."""

    def __getattr__(self, name: str) -> Any:
        tracer = self.tracer
        assert isinstance(tracer, ShapedTracer)
        value = tracer.values[self.node] if name not in ("device", "is_meta", "is_cuda") else tracer.tensors[0]
        value = getattr(value, name)
        if isinstance(value, Tensor):
            return tracer.create_proxy("call_function", getattr, (self, name), {})
        return fx.proxy.Attribute(self, name) if callable(value) and not isinstance(value, type) else value

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Any:
        return (self[k] for k in range(len(self)))  # type: ignore[index] # fx adds it

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    @property
    def _value(self) -> Tensor:
        tracer = self.tracer
        assert isinstance(tracer, ShapedTracer)
        value: Tensor = tracer.values[self.node]
        return value


class ShapedTracer(Tracer):
    """Computes as it records, so that every size is known; looks into functions that were wrapped to hide them."""

    def __init__(self, form: Form, hooked: bool, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__(form, hooked)
        self.values: dict[fx.Node, Any] = {}
        self._model, self.tensors = model, tensors
        self._computing = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapedProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:  # noqa: ARG002 - fx's
        return attr_val  # weights are what they are: what is computed of them alone needs no recording

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind == "call_function" and is_wrapped(target):
            return _marked(target(*args, **kwargs))
        if kind in ("call_function", "call_method") and target in operators.REWRITES:
            return operators.REWRITES[target](*args, **kwargs)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        value = self.values[proxy.node] = self._computed(proxy.node)
        if isinstance(value, Tensor) or kind == "placeholder":
            return proxy
        if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
            return [self.create_proxy("call_function", operator.getitem, (proxy, k), {}) for k in range(len(value))]
        return value

    def _value(self, n: fx.Node) -> Any:
        if n not in self.values:  # a constant tensor, which fx hangs on the model
            self.values[n] = self._computed(n)
        return self.values[n]

    def _computed(self, n: fx.Node) -> Any:
        """The value of a node, without contents: code that branches on more than shapes finds nothing to look at."""
        if n.op == "placeholder":
            before = sum(k.op == "placeholder" for k in self.values)
            return torch.empty_like(self.tensors[before], device="meta")
        if n.op == "get_attr":
            value = _attribute(self._model, str(n.target))
            return value.to("meta") if isinstance(value, Tensor) else value
        args: Any = fx.map_arg(n.args, self._value)
        kwargs: Any = fx.map_arg(n.kwargs, self._value)
        if n.op == "call_module":
            module = self._model.get_submodule(str(n.target))
            state = {name: t.to("meta") for name, t in (*module.named_parameters(), *module.named_buffers())}
            self._computing = True
            try:
                return torch.func.functional_call(module, state, args, kwargs)
            finally:
                self._computing = False
        return _evaluate(n, None, args, kwargs)


class _Marked(tuple[Any, ...]):
    """What a wrapped function returned, with a node for fx to leave its mark on."""

    node: fx.Node


def _marked(returned: Any) -> Any:
    if not isinstance(returned, list | tuple) or not any(isinstance(r, fx.Proxy) for r in returned):
        return returned
    marked = _Marked(returned)
    marked.node = next(r.node for r in returned if isinstance(r, fx.Proxy))
    return marked


def is_wrapped(target: Any) -> bool:
    """Whether a function is a model's own, which fx was told (``torch.fx.wrap``) not to look into."""
    home = (getattr(target, "__module__", None) or "").partition(".")[0]
    return (
        inspect.isfunction(target) and home not in ("torch", "_operator", "builtins") and operators.find(target) is None
    )


# -- from fx to nodes --


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
        nodes.append(Node(f"{name}#{count}" if count else name, operation, kinds, calls, _source(n)))
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


def _line() -> str | None:
    """The line of the model that is running now, written as in a traceback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    if frame is None:
        return None
    file, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    return f'  File "{file}", line {line}, in {function}\n    {linecache.getline(file, line).strip()}'


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


_OURS = (Path(__file__).with_name(f"{room}.py") for room in ("trace", "hooks", "forms", "export"))
_NOT_THE_MODEL = (f"{Path(torch.__file__).parent}{os.sep}", *map(str, _OURS))


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
