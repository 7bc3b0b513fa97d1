"""Twins of a model: what other libraries get to hook and rewrite, so that the user's own model stays as it is.

A *shadow* has modules of its own over the same weights. An *unshared* twin is also a graph in which every call has a
module of its own and nothing runs in place, as libraries that hook modules need it: torchvision's ResNets call one
in-place ReLU three times a block.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from relprop.errors import RelpropError
from relprop.graph import Call
from relprop.recording import mutated
from relprop.state import State, undisturbed
from relprop.trace import TRACING
from relprop.tracers import Tracer

__all__ = ["check_twin", "shadow", "unshared"]

_POOL = ("kernel_size", "stride", "padding")
_RELU = (nn.ReLU, ())
_FUNCTIONS: dict[Any, tuple[type[nn.Module], tuple[str, ...]]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"), _RELU),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_"), (nn.Sigmoid, ())),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh", "tanh_"), (nn.Tanh, ())),
    **dict.fromkeys((F.softmax, torch.softmax, "softmax"), (nn.Softmax, ("dim",))),
    F.elu: (nn.ELU, ("alpha",)),
    F.leaky_relu: (nn.LeakyReLU, ("negative_slope",)),
    F.softplus: (nn.Softplus, ("beta", "threshold")),
    F.dropout: (nn.Dropout, ("p",)),
    F.max_pool2d: (nn.MaxPool2d, (*_POOL, "dilation", "ceil_mode")),
    F.avg_pool2d: (nn.AvgPool2d, (*_POOL, "ceil_mode", "count_include_pad", "divisor_override")),
    F.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
}
"""Functions that libraries know as modules, and the names of their arguments after the input."""

_SETTLED = {"inplace", "training", "return_indices", "_stacklevel", "dtype"}
"""Arguments that a module does not take; the model is in evaluation mode, and in-place is what is to go."""

_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_OUT_OF_PLACE = {getattr(operator, "i" + name): getattr(operator, name) for name in ("add", "sub", "mul", "truediv")}
_CURVED = (nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softmax, nn.MaxPool2d)


def shadow(model: nn.Module, *, own_weights: bool = False) -> nn.Module:
    """A copy of a model's modules over the same parameters, which need no gradients there; buffers are its own.

    Args:
        model: The model; nothing is changed on it.
        own_weights: Copy the weights as well, for who is going to change them.

    Returns:
        The copy; hooks, attributes and flags set on it are not seen on the model.
    """

    def same(tensor: Tensor) -> Tensor:
        # .data: a write would not be counted as one on the model's own tensor, nor does a gradient reach it.
        if not isinstance(tensor, nn.Parameter):
            return tensor.data.clone()  # a model may count its calls in a buffer
        return nn.Parameter(tensor.data.clone() if own_weights else tensor.data, requires_grad=False)

    held = [*model.parameters(), *model.buffers()]
    # Others hang on modules unregistered, such as those that weight_norm computes; deepcopy refuses them.
    held += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(tensor): same(tensor) for tensor in held})


def unshared(
    model: nn.Module,
    *,
    sums: Callable[[], nn.Module] | None = None,
    pools: Callable[[nn.MaxPool2d], nn.Module] | None = None,
    own_weights: bool = False,
) -> fx.GraphModule:
    """An equivalent of a model in which every call has a module of its own and nothing runs in place.

    Functions that libraries know as modules become modules: activations, pools, dropout and, on request, sums. Every
    activation and max pool gets its input under a name of its own, so that a hook on it sees the gradient of this one
    use, and does not stand on one tensor with the hook of the module before.

    Args:
        model: A model in evaluation mode; nothing is changed on it.
        sums: Makes the module for a sum of two tensors; None leaves sums as functions, which hooks cannot see.
        pools: Makes what is to stand for a max pool; None leaves it.
        own_weights: As for :func:`shadow`.

    Returns:
        The twin; a module that is called once keeps its name, later calls are ``name_1`` and so on.

    Raises:
        RelpropError: If the model's code cannot be traced.
    """
    twin = shadow(model, own_weights=own_weights)
    graph, around = _traced(twin)
    order = {node: i for i, node in enumerate(graph.nodes)}
    modules = {n: twin.get_submodule(str(n.target)) if n.op == "call_module" else None for n in order}
    writing = {node for node, module in modules.items() if mutated(node, module) is not None}
    called: set[str] = set()
    for node, module in modules.items():
        if node in writing:  # whoever reads that tensor from here on reads the new value
            written, now = node.all_input_nodes[0], order[node]
            written.replace_all_uses_with(node, lambda user, now=now: order.get(user, -1) > now)
        if module is not None:
            own = shadow(module, own_weights=own_weights) if node.target in called else module
            if own is not module:
                node.target = _add(twin, str(node.target), own)
            called.add(str(node.target))
            if getattr(own, "inplace", False):
                own.inplace = False  # type: ignore[assignment] # torch types what it does not know as a module
        elif (made := _as_module(node, sums)) is not None:
            label = str(getattr(node.target, "__name__", node.target)).strip("_")
            owner = next((call[0] for call in reversed(around.get(node, ()))), "")
            with graph.inserting_after(node):
                new = graph.call_module(_add(twin, f"{owner}.{label}".lstrip("."), made[0].eval()), made[1])
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        elif node.op == "call_function":
            node.target = _OUT_OF_PLACE.get(node.target, node.target)
    _part(twin, graph, pools)
    made_of = fx.GraphModule(twin, graph)
    made_of.graph.eliminate_dead_code()
    for node in [n for n in made_of.graph.nodes if n.op == "placeholder" and not n.users]:
        made_of.graph.erase_node(node)
    made_of.recompile()
    return made_of


_CHECKED: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def check_twin(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Refuses a twin that computes something else than its model; looked at once for a model in one state.

    Raises:
        RelpropError: If their outputs for the first sample differ.
    """
    known = _CHECKED.get(model)
    if known is not None and known.holds(model):
        return
    with torch.no_grad(), undisturbed(model):
        expected, output = model(x[:1].clone()), twin(x[:1].clone())
    if not torch.allclose(output, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
        raise RelpropError(
            f"The traced graph of {type(model).__name__} computes something else than the model, so no other library "
            "gets it; code that draws at random, branches on values or writes into views cannot be traced."
        )
    _CHECKED[model] = State(model)


def _traced(twin: nn.Module) -> tuple[fx.Graph, dict[fx.Node, tuple[Call, ...]]]:
    """What fx records of a model of one input, and the calls of modules around each node."""
    tracer = Tracer()
    parameters = [*inspect.signature(twin.forward).parameters.values()][1:]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    with TRACING, undisturbed(twin):
        try:
            graph = tracer.trace(twin, concrete_args=defaults or None)
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise RelpropError(
                f"{type(twin).__name__} cannot be traced by torch.fx ({type(error).__name__}: {reason}), so it has no "
                "twin in which every call has a module of its own."
            ) from error
    # fx asserts that arguments with defaults keep them; the twin does not have them.
    for node in [n for n in graph.nodes if getattr(n.target, "__name__", "").startswith("_assert")]:
        graph.erase_node(node)
    return graph, tracer.around


def _as_module(node: fx.Node, sums: Callable[[], nn.Module] | None) -> tuple[nn.Module, tuple[Any, ...]] | None:
    """The module that does what a function does, and what it is called with; None where it stays a function."""
    if node.op not in ("call_function", "call_method"):
        return None
    if sums is not None and node.target in _SUMS and not node.kwargs:
        return (sums(), node.args) if all(isinstance(a, fx.Node) for a in node.args) else None
    if node.target not in _FUNCTIONS:
        return None
    kind, names = _FUNCTIONS[node.target]
    settings = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    value = settings.pop("input", None) or node.args[0]
    settings = {name: setting for name, setting in settings.items() if name not in _SETTLED}
    return kind(**settings), (value,)


def _add(twin: nn.Module, name: str, module: nn.Module) -> str:
    """Hangs a module into the twin, next to its namesakes."""
    there, count = {n for n, _ in twin.named_modules(remove_duplicate=False)}, 1
    unique = name
    while unique in there:
        unique, count = f"{name}_{count}", count + 1
    parent, _, leaf = unique.rpartition(".")
    twin.get_submodule(parent).add_module(leaf, module)
    return unique


def _part(twin: nn.Module, graph: fx.Graph, pools: Callable[[nn.MaxPool2d], nn.Module] | None) -> None:
    """Gives every activation and max pool its input under a name of its own, and pools what is to stand for them."""
    for node in [n for n in graph.nodes if n.op == "call_module"]:
        module = twin.get_submodule(node.target)
        if isinstance(module, _CURVED):
            with graph.inserting_before(node):
                node.args = (graph.call_method("view_as", (node.args[0], node.args[0])),)
        if pools is not None and isinstance(module, nn.MaxPool2d):
            node.target = _add(twin, node.target, pools(module))
