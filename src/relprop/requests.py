"""Requests: what a caller asked for, checked before anything is computed.

Each function either returns the request in the engine's own form or refuses it in one sentence that names the thing
and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from relprop import forms
from relprop.errors import RelpropError
from relprop.forms import Form, Output
from relprop.graph import Call, Graph
from relprop.mapped import Mapped
from relprop.merges import Split
from relprop.operators import MaxPool
from relprop.presets import Pooling
from relprop.rules import Rule

PRECISIONS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
"""In these, relevance cannot add up: such models are explained in float32."""

OUTPUT = ":output"
"""Behind a module's name among the layers whose relevance is kept: that of its output, not of its input."""


def module(model: Any, *, halves: bool = False) -> nn.Module:
    """The module to explain.

    Args:
        model: The model.
        halves: Whether it may have half precision.

    Raises:
        RelpropError: If it is not a module, is in training mode, or has a precision or devices that cannot be used.
    """
    inner = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        msg = f"The model is a {type(model).__name__}; pass a torch.nn.Module, or what relprop.load returns."
        raise RelpropError(msg)
    while isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = inner.module  # the wrapper only hands batches out
    inner = getattr(inner, "_orig_mod", inner)  # what torch.compile has compiled
    training = next((name for name, m in inner.named_modules() if m.training), None)
    if training is not None:
        which = f"its module {training!r}" if training else "the model"
        msg = f"{type(inner).__name__} cannot be explained while {which} is in training mode; call model.eval() first."
        raise RelpropError(msg)
    tensors = [t for t in held(inner) if t.is_floating_point() or t.is_complex()]
    if any(is_lazy(t) for t in tensors):
        msg = f"{type(inner).__name__} has lazy modules without weights yet; run one batch through the model first."
        raise RelpropError(msg)
    precisions = sorted({t.dtype for t in tensors}, key=str)
    if len(precisions) > 1:
        names = ", ".join(map(_short, precisions))
        msg = f"{type(inner).__name__} has weights of several precisions ({names}); convert it with model.float()."
        raise RelpropError(msg)
    for dtype in precisions:
        if dtype not in (*PRECISIONS, *(HALVES if halves else ())):
            msg = (
                f"{type(inner).__name__} has {_short(dtype)} weights, in which relevance cannot add up; convert it "
                "with model.float()."
            )
            raise RelpropError(msg)
    if len({t.device for t in tensors}) > 1:
        devices = ", ".join(sorted({str(t.device) for t in tensors}))
        msg = f"{type(inner).__name__} lies on several devices ({devices}); move it to one with model.to(...)."
        raise RelpropError(msg)
    return inner


def pixels(model: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The smallest and largest value that a pixel can have, by channel, where the model tells its normalisation."""
    normalization = None if isinstance(model, nn.Module) else getattr(model, "normalization", None)
    if normalization is None:
        return None
    mean, std = normalization
    low, high = (tuple((end - m) / s for m, s in zip(mean, std, strict=True)) for end in (0.0, 1.0))
    return low, high


def device(model: nn.Module) -> torch.device:
    """Where a model lies; the CPU for one without tensors."""
    return next((t.device for t in held(model)), torch.device("cpu"))


def held(model: nn.Module) -> Iterator[Tensor]:
    """The tensors of a model, one after another: a large one has hundreds, and often the first will do."""
    return chain(model.parameters(), model.buffers())


def like(model: nn.Module, x: Tensor) -> Tensor:
    """A tensor of the kind that a model computes with; another where it holds none."""
    return next((t for t in held(model) if t.is_floating_point()), x)


def check_input(x: Any, model: nn.Module) -> None:
    """Refuses what is no batch of finite inputs of the model's kind, in one tensor.

    Raises:
        RelpropError: With what is wrong and how to mend it.
    """
    if not isinstance(x, Tensor):
        msg = f"The input is a {type(x).__name__}; pass a torch.Tensor with a batch axis in front."
        raise RelpropError(msg)
    _, (tensor,) = inputs(x, model)
    if not tensor.is_floating_point():
        raise RelpropError(_other_kind(tensor, "The input", like(model, tensor).dtype))


def inputs(x: Any, model: nn.Module, output: Output = None) -> tuple[Form, tuple[Tensor, ...]]:
    """The form of the call that is to be explained, and its tensors.

    Raises:
        RelpropError: If they are no batch of finite inputs of the model's kind; says how to mend it.
    """
    shape, tensors = forms.form(x, model, output)
    for name, tensor in zip(shape.names, tensors, strict=True):
        _check(tensor, "The input" if len(tensors) == 1 else f"The input {name!r}", like(model, tensor))
    first = tensors[0]
    if first.ndim < (2 if len(tensors) == 1 else 1):
        msg = (
            f"The input has shape {tuple(first.shape)}; relprop expects a batch axis in front, such as x.unsqueeze(0) "
            "adds."
        )
        raise RelpropError(msg)
    for name, tensor in zip(shape.names, tensors, strict=True):
        if tensor.ndim < 1 or len(tensor) != len(first):
            msg = (
                f"The input {name!r} has shape {tuple(tensor.shape)} beside a batch of {len(first)}; give every input "
                "the same batch axis in front, or fix it in a module around the model."
            )
            raise RelpropError(msg)
    return shape, tensors


def _check(x: Tensor, name: str, mine: Tensor) -> None:
    """Refuses a tensor that is not of the model's kind, or not finite."""
    if x.layout != torch.strided:
        msg = f"{name} is sparse; pass x.to_dense()."
        raise RelpropError(msg)
    whole = not x.is_floating_point() and not x.is_complex()
    if not whole and (x.dtype != mine.dtype or x.dtype not in (*PRECISIONS, *HALVES)):
        raise RelpropError(_other_kind(x, name, mine.dtype))
    if x.device != mine.device:
        msg = f"{name} lies on {x.device}, but the model on {mine.device}; move it with x.to({str(mine.device)!r})."
        raise RelpropError(msg)
    if not x.numel():
        msg = f"{name} is an empty batch, of shape {tuple(x.shape)}; pass at least one sample."
        raise RelpropError(msg)
    if not finite(x):
        bad = ~torch.isfinite(x)
        sample = int(bad.reshape(len(x), -1).any(1).nonzero()[0]) if x.ndim else 0
        msg = (
            f"{name} has {int(bad.sum())} NaN or infinite values, the first in sample {sample}; clean it, such "
            "as with x.nan_to_num()."
        )
        raise RelpropError(msg)


def finite(x: Tensor) -> bool:
    """Whether there is no NaN and nothing infinite in a tensor: one would be in its sum too, which is soon found."""
    return bool(torch.isfinite(x.sum()) or torch.isfinite(x).all())


def _other_kind(x: Tensor, name: str, dtype: torch.dtype) -> str:
    wanted = dtype if dtype in (*PRECISIONS, *HALVES) else torch.float32
    return (
        f"{name} is {_short(x.dtype)}, but the model computes in {_short(wanted)}; convert it with "
        f"x.to(torch.{_short(wanted)})."
    )


def check_whole(tensors: Sequence[Tensor], graph: Graph, model: nn.Module) -> None:
    """Refuses whole numbers where the model computes with them, instead of looking something up.

    Raises:
        RelpropError: With the kind of numbers that it wants.
    """
    consumers = graph.consumers()
    for i, tensor in enumerate(tensors):
        if not tensor.is_floating_point() and any(
            isinstance(graph.nodes[j].operator, Mapped | MaxPool) for j in consumers[i]
        ):
            name = "The input" if len(tensors) == 1 else f"The input {graph.nodes[i].name.removeprefix('input.')!r}"
            raise RelpropError(_other_kind(tensor, name, like(model, tensor).dtype))


def check_plan(preset: Any, split: Any, identity_skips: Any, overrides: Any, layer: Any = None) -> None:
    """Refuses what no plan can be made of, whatever the model.

    Raises:
        RelpropError: With the argument and what it may be.
    """
    if not isinstance(preset, str):
        msg = f"The preset is {brief(preset)}; pass a name."
        raise RelpropError(msg)
    if split is not None and not (isinstance(split, str | Split) or callable(split)):
        msg = f"The split is {brief(split)}; pass a name, or a function from the branches to their shares."
        raise RelpropError(msg)
    if not isinstance(identity_skips, bool):
        msg = f"identity_skips is {brief(identity_skips)}; pass True or False."
        raise RelpropError(msg)
    if not isinstance(layer, str | None):
        msg = f"There is no layer {brief(layer)}; pass the name of one module or node."
        raise RelpropError(msg)
    if overrides is not None and not isinstance(overrides, Mapping):
        msg = (
            f"The overrides are {brief(overrides)}; pass a dict from names, types or block numbers to rules or splits."
        )
        raise RelpropError(msg)
    for key, value in (overrides or {}).items():
        if not (isinstance(value, str | Rule | Split | Pooling) or callable(value)):
            msg = f"The override for {key!r} is {brief(value)}; pass a rule, a split or a name of one."
            raise RelpropError(msg)


def targets(target: Any, output: Sequence[int], what: str = "the model has {0} classes") -> Tensor | None:
    """The targets as a ``(B,)`` or ``(B, T)`` tensor; None for the predicted ones.

    Args:
        target: What the user asked for.
        output: The shape of the output, classes second.
        what: What it has so many of.

    Raises:
        RelpropError: If they do not fit the output.
    """
    batch, classes = output[:2]
    if target is None:
        return None
    try:
        tensor = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        msg = f"The target {brief(target)} is no class number; pass an int, a list of ints or an integer tensor."
        raise RelpropError(msg)
    tensor = tensor.long()
    if tensor.ndim == 0:
        tensor = tensor.expand(batch)
    if tensor.ndim > 2 or tensor.shape[0] != batch or not tensor.numel():
        msg = (
            f"The target has shape {tuple(tensor.shape)} for a batch of {batch}; pass one number for all, "
            f"({batch},) or ({batch}, T) of them."
        )
        raise RelpropError(msg)
    outside = tensor[(tensor < 0) | (tensor >= classes)]
    if outside.numel():
        have = what.format(classes)
        msg = f"The target {int(outside[0])} is out of range; {have}, 0 to {classes - 1}."
        raise RelpropError(msg)
    return tensor


def name_of(layer: nn.Module | str, model: nn.Module) -> str:
    """The name of a module inside a model; a name stays as it is.

    Raises:
        RelpropError: If it is not in there.
    """
    if isinstance(layer, str):
        return layer
    name = next((name for name, there in model.named_modules() if there is layer), None)
    if not isinstance(name, str) or not name:
        msg = f"The layer ({type(layer).__name__}) is no module inside {type(model).__name__}; pass one, or its name."
        raise RelpropError(msg)
    return name


def layers(names: Sequence[str], graph: Graph) -> list[Call]:
    """All calls of the modules of these names, which may end in ``:output``.

    Raises:
        RelpropError: If there is no such module.
    """
    calls = graph.calls
    wanted = []
    if not isinstance(names, Iterable):
        msg = f"layers is {brief(names)}; pass a list of modules' names."
        raise RelpropError(msg)
    for name in [names] if isinstance(names, str) else names:
        module = str(name).removesuffix(OUTPUT)
        found = [(str(name), call) for there, call in calls if there == module]
        if not found:
            near = get_close_matches(module, sorted({call[0] for call in calls}), 3)
            hint = f"; the nearest names are {', '.join(near)}" if near else ""
            msg = f"There is no module {module!r} to keep the relevance of{hint}."
            raise RelpropError(msg)
        wanted += found
    return wanted


def predicted(output: Tensor) -> Tensor:
    """The predicted class of each sample; of a map, the one that most pixels are predicted to be of."""
    best = output.argmax(1)
    return best if best.ndim == 1 else best.flatten(1).mode(1).values


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def brief(value: Any) -> str:
    """A value as a sentence can name it."""
    text = repr(value)
    return text if len(text) <= 40 else f"of type {type(value).__name__}"
