"""Exporting: models whose code torch.fx cannot follow.

``torch.export`` runs a model's code with tensors without contents and writes down what they go through, in operators of
its own (ATen). Here each of them is given back the name that it has in torch, so that the same table, and the same
rules, serve both. What is exported is good for inputs of one shape only, and the user's hooks are a part of it.
"""

from __future__ import annotations

import io
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn import functional as F

from relprop import operators
from relprop.errors import RelpropError
from relprop.forms import Form
from relprop.graph import Call, Graph
from relprop.quiet import quietly
from relprop.recording import Recording, made
from relprop.state import undisturbed
from relprop.trace import TRACING, TraceError

Spelling = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function, or the name of a method, and what it is called with."""


class _Answer(nn.Module):
    """A model of tensors alone that returns only what is meant."""

    def __init__(self, model: nn.Module, form: Form) -> None:
        super().__init__()
        self.model, self._form = model, form

    def forward(self, *tensors: Tensor) -> Any:
        return self._form.answer(self._form.call(self.model, tensors))


def trace(model: nn.Module, form: Form, tensors: Sequence[Tensor], *, hooked: bool = False) -> Graph:  # noqa: ARG001 - they always are
    """Traces a model through torch.export.

    Args:
        model: The model, in evaluation mode.
        form: How it is called.
        tensors: Its inputs.
        hooked: Whether the user's hooks are part of it; here they always are.

    Returns:
        Its graph, for inputs of these shapes.

    Raises:
        RelpropError: If torch.export cannot follow its code, either.
    """
    # What is exported is rid of code that writes in place; what we do in smaller steps is written down in those.
    steps = {
        overload: rewrite
        for function, rewrite in operators.REWRITES.items()
        for overload in _overloads(getattr(function, "__name__", ""))
    }
    with TRACING, undisturbed(model), torch.no_grad(), _quiet():
        try:
            program = torch.export.export(_Answer(model, form).eval(), tuple(tensors), strict=False)
            program = program.run_decompositions(steps)
        except RelpropError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            msg = f"{type(model).__name__} cannot be exported by torch.export ({type(error).__name__}: {reason})."
            raise TraceError(msg) from error
        return made(model, _recording(model, program), form, tensors)


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch remarks on its own ways here, and prints what it had when it gives up: one sentence, ours, is enough."""
    remarks = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = remarks.disabled
    remarks.disabled = True
    try:
        with quietly(), redirect_stderr(io.StringIO()):
            yield
    finally:
        remarks.disabled = before


def _overloads(name: str) -> list[OpOverload]:
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("_") else None
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _recording(model: nn.Module, program: torch.export.ExportedProgram) -> Recording:
    graph = program.graph
    constants: dict[fx.Node, Any] = {}
    places = [n for n in graph.nodes if n.op == "placeholder"]
    for n, spec in zip(places, program.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            name = str(spec.target)
            constant = program.state_dict[name] if name in program.state_dict else program.constants[name]
            constants[n] = constant.detach() if isinstance(constant, Tensor) else constant
    around = {n: _calls(n) for n in graph.nodes}
    kinds = {name: type(model.get_submodule(name)) for calls in around.values() for name, _ in calls}
    # A module that is one operator gives it its name, as where torch.fx traces it.
    inside = Counter(calls[-1] for n, calls in around.items() if calls and n.target is not operator.getitem)
    names = {
        n: calls[-1][0]
        for n, calls in around.items()
        if calls and inside[calls[-1]] == 1 and operators.find(kinds[calls[-1][0]]) is not None
    }
    for n in list(graph.nodes):
        if isinstance(n.target, OpOverload):
            target, n.args, n.kwargs = _spelled(n)
            n.op, n.target = "call_method" if isinstance(target, str) else "call_function", target
    # Before what the model returns stand the new values of what it writes to: buffers, or its own input.
    kinds_of_outputs = [spec.kind for spec in program.graph_signature.output_specs]
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = (output.args[0][kinds_of_outputs.index(OutputKind.USER_OUTPUT)],)
    return Recording(graph, around, kinds, constants, names)


def _calls(n: fx.Node) -> tuple[Call, ...]:
    """The calls of the model's modules that a node stands in, as torch.export notes them: ``path@1`` for a second."""
    calls = []
    for key, (path, _) in (n.meta.get("nn_module_stack") or {}).items():
        name = path.removeprefix("model").removeprefix(".").replace("._orig_mod", "")
        count = key.rpartition("@")[2] if "@" in key else "0"
        if name:
            calls.append((name, int(count)))
    return tuple(calls)


# -- ATen's operators by their names in torch --


def _spelled(n: fx.Node) -> Spelling:
    """How a call of an ATen operator is spelled in torch; as it is, where nothing else is known."""
    target = n.target
    assert isinstance(target, OpOverload)
    name = target._opname.removesuffix("_") or target._opname
    args, kwargs = tuple(n.args), dict(n.kwargs)
    if name in _SPELLINGS:
        return _SPELLINGS[name](n, *args, **kwargs)
    found = [getattr(home, name) for home in (torch, F) if hasattr(home, name)]
    known = next((f for f in (*found, name) if f in operators.TABLE or f in operators.EMPTY), None)
    return (target if known is None else known), args, kwargs


def _rank(n: Any) -> int:
    rank: int = n.meta["val"].ndim
    return rank


def _slice(_: fx.Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Spelling:
    whole = (slice(None),) * (dim % _rank(x))
    return operator.getitem, (x, (*whole, slice(start, end, step))), {}


def _index(_: fx.Node, x: Any, indices: Sequence[Any]) -> Spelling:
    return operator.getitem, (x, tuple(slice(None) if i is None else i for i in indices)), {}


def _batch_norm(
    _: fx.Node,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *__: Any,
) -> Spelling:
    return F.batch_norm, (x, mean, var, weight, bias, training, momentum, eps), {}


def _instance_norm(
    _: fx.Node, x: Any, weight: Any, bias: Any, mean: Any, var: Any, own: bool, momentum: float, eps: float, *__: Any
) -> Spelling:
    return F.instance_norm, (x, mean, var, weight, bias, own, momentum, eps), {}


def _first(function: Callable[..., Any], count: int) -> Callable[..., Spelling]:
    """A function that takes fewer arguments than its operator."""
    return lambda _, *args, **__: (function, args[:count], {})


def _converted(_: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Spelling:
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
    return ("clone", (x,), {}) if dtype is None else ("to", (x, dtype), {})


def _padded(mode: str) -> Callable[..., Spelling]:
    def spelling(_: fx.Node, x: Any, pad: Sequence[int], value: float = 0.0) -> Spelling:
        return F.pad, (x, list(pad), mode, *((value,) if mode == "constant" else ())), {}

    return spelling


def _resized(mode: str) -> Callable[..., Spelling]:
    def spelling(_: fx.Node, x: Any, size: Any, *args: Any) -> Spelling:
        corners = {} if mode == "nearest" else {"align_corners": args[0]}
        scale = args[-1] if args and isinstance(args[-1], list | tuple) else None
        return F.interpolate, (x, size, None if size is not None else list(scale or ()), mode), corners

    return spelling


def _alone(function: Callable[..., Any]) -> Callable[..., Spelling]:
    """A call that returns other things, too, such as indices, which nobody here asks for."""

    def spelling(n: fx.Node, *args: Any, **kwargs: Any) -> Spelling:
        for user in [u for u in n.users if u.target is operator.getitem and u.args[1] == 0]:
            user.replace_all_uses_with(n)
            n.graph.erase_node(user)
        if function is F.batch_norm:
            x, weight, bias, mean, var, momentum, eps = args
            args = (x, mean, var, weight, bias, False, momentum, eps)
        return function, args, kwargs

    return spelling


def _convolved(
    _: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> Spelling:
    axes = _rank(x) - 2
    if transposed:
        return getattr(F, f"conv_transpose{axes}d"), (x, weight, bias, stride, padding, *rest, dilation), {}
    return getattr(F, f"conv{axes}d"), (x, weight, bias, stride, padding, dilation, rest[1]), {}


def filled(x: Tensor, value: Any) -> Tensor:
    """A tensor like another one, with one value everywhere."""
    return torch.zeros_like(x).add(value)


operators.EMPTY.add(filled)

_SPELLINGS: dict[str, Callable[..., Spelling]] = {
    "slice": _slice,
    "index": _index,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "_native_batch_norm_legit_no_training": _alone(F.batch_norm),
    "layer_norm": _first(F.layer_norm, 5),
    "group_norm": _first(F.group_norm, 5),
    "embedding": lambda _, table, x, *__, **___: (F.embedding, (x, table), {}),
    "to": _converted,
    "_to_copy": _converted,
    "alias": lambda _, x: ("contiguous", (x,), {}),
    "lift_fresh_copy": lambda _, x: ("clone", (x,), {}),
    "_unsafe_view": lambda _, x, size: ("view", (x, size), {}),
    "mm": lambda _, a, b: (torch.matmul, (a, b), {}),
    "rsub": lambda _, a, b, alpha=1: (torch.sub, (b, a), {"alpha": alpha}),
    "copy": lambda _, x, source, *__: ("expand_as", (source, x), {}),
    "fill": lambda _, x, value: (filled, (x, value), {}),
    "zero": lambda _, x: (torch.zeros_like, (x,), {}),
    "_softmax": lambda _, x, dim, *__: (torch.softmax, (x, dim), {}),
    "feature_dropout": lambda _, *args: (F.dropout2d, args, {}),
    "constant_pad_nd": _padded("constant"),
    "convolution": _convolved,
    **{f"reflection_pad{k}d": _padded("reflect") for k in (1, 2, 3)},
    **{f"replication_pad{k}d": _padded("replicate") for k in (1, 2, 3)},
    **{f"upsample_nearest{k}d": _resized("nearest") for k in (1, 2, 3)},
    "upsample_linear1d": _resized("linear"),
    "upsample_bilinear2d": _resized("bilinear"),
    "upsample_trilinear3d": _resized("trilinear"),
    "upsample_bicubic2d": _resized("bicubic"),
    **{f"max_pool{k}d_with_indices": _alone(getattr(F, f"max_pool{k}d")) for k in (2, 3)},
    **{f"adaptive_max_pool{k}d": _alone(getattr(F, f"adaptive_max_pool{k}d")) for k in (1, 2, 3)},
}
"""Operators whose names or arguments are not those of torch's functions."""
