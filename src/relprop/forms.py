"""Forms: how a model is called, and which of the things that it returns is meant.

A model may take one tensor, several, or tensors by name, with settings between them, and may return tensors in tuples,
dicts or objects of its own. A form is the call with numbered slots in place of the tensors, so that the same call can
be made with real tensors, with symbols, or with relevance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor, fx, nn

from relprop.errors import RelpropError

Output = str | int | Sequence[str | int] | None
"""Which of the things that a model returns is meant: a key or a position, or several on the way to it."""

_SETTINGS = (bool, int, float, str, type(None))
_PREFERRED = ("out", "logits")


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among a call's arguments."""

    number: int


@dataclass(frozen=True)
class Form:
    """How a model is called.

    Attributes:
        args: The positional arguments, with slots for tensors.
        kwargs: The others.
        names: What the model calls its tensors.
        given: The input as the user gave it, with slots for tensors.
        output: Which of the things that it returns is meant.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    given: Any = field(compare=False)
    output: tuple[str | int, ...] = ()

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Calls a function with values in place of the slots."""
        return function(*_filled(self.args, values), **_filled(self.kwargs, values))

    def like(self, values: Sequence[Any]) -> Any:
        """Values in the form in which the user gave the input; None for what is no tensor there."""
        return _filled(self.given, values, settings=False)

    def answer(self, returned: Any) -> Any:
        """What is meant of what a model returns.

        Raises:
            RelpropError: If it cannot be found, or nothing says which it is.
        """
        for key in self.output:
            parts = _parts(returned)
            if key not in parts:
                there = ", ".join(map(repr, parts)) or "no parts"
                msg = f"The model returns a {type(returned).__name__} with {there}; there is no output {key!r} in it."
                raise RelpropError(msg)
            returned = parts[key]
        parts = _parts(returned)
        tensors = {key: part for key, part in parts.items() if isinstance(part, Tensor | fx.Proxy)}
        named = next((key for key in _PREFERRED if key in tensors), None)
        if named is not None or len(set(map(id, tensors.values()))) == 1:
            return tensors[named] if named is not None else next(iter(tensors.values()))
        if not isinstance(returned, Tensor | fx.Proxy):
            there = f" with {', '.join(map(repr, parts))}" if parts else ""
            path = (*self.output, next(iter(tensors or parts), 0))
            example = path if self.output else path[0]
            msg = (
                f"The model returns a {type(returned).__name__}{there}; relprop explains one tensor (batch, classes): "
                f"that called 'out' or 'logits', or the one that output={example!r} or the like names."
            )
            raise RelpropError(msg)
        return returned


def form(x: Any, model: nn.Module, output: Output = None) -> tuple[Form, tuple[Tensor, ...]]:
    """Takes a user's input apart: a tensor, a tuple with all arguments in their order, or a dict with them by name.

    Returns:
        The form of the call, and its tensors.

    Raises:
        RelpropError: If there is no tensor in it, or the model cannot be called so.
    """
    tensors: list[Tensor] = []
    given = _with_slots(x, tensors) if isinstance(x, Tensor | Mapping | list | tuple) else None
    if not tensors:
        what = f"{type(x).__name__} without tensors" if isinstance(x, Mapping | list | tuple) else type(x).__name__
        msg = f"The input is a {what}; pass a torch.Tensor with a batch axis in front, or a tuple or dict of them."
        raise RelpropError(msg)
    args, kwargs = _arguments(given)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        name = type(model).__name__
        msg = f"{name} cannot be called with {_described(x)}: {error}; pass a tuple, or a dict from names to tensors."
        raise RelpropError(msg) from None
    names = {slot.number: label for key, value in bound.arguments.items() for label, slot in _names(value, key)}
    return Form(args, kwargs, tuple(names[k] for k in range(len(tensors))), given, _path(output)), tuple(tensors)


def plain(model: nn.Module, output: Output = None) -> Form:
    """The form of the plainest call of a model: a tensor for its first argument and each that has no default."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    needed = [p for k, p in enumerate(parameters) if not k or (p.default is p.empty and p.kind in _BY_POSITION)]
    slots = tuple(map(Slot, range(len(needed))))
    given = slots[0] if len(slots) == 1 else slots
    return Form(slots, {}, tuple(p.name for p in needed), given, _path(output))


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def mapped(value: Any, function: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """What a function of a name and a tensor makes of all tensors in a structure like a user's input."""
    if isinstance(value, Tensor):
        return function(name, value)
    if isinstance(value, Mapping):
        return {key: mapped(part, function, f"{name}.{key}".lstrip(".")) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(mapped(part, function, f"{name}.{key}".lstrip(".")) for key, part in enumerate(value))
    return None


def _path(output: Output) -> tuple[str | int, ...]:
    if output is None:
        return ()
    path = (output,) if isinstance(output, str | int) else output
    if not isinstance(path, Sequence) or not all(isinstance(key, str | int) for key in path):
        msg = f"The output is {output!r}; pass the key or the position of the tensor to explain."
        raise RelpropError(msg)
    return tuple(path)


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), {str(key): value for key, value in given.items()}
    return (given,) if isinstance(given, Slot) else tuple(given), {}


def _with_slots(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {key: _with_slots(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_with_slots(part, tensors) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if not isinstance(value, _SETTINGS):
        msg = f"The input has a {type(value).__name__} in it; pass torch.Tensors with a batch axis in front."
        raise RelpropError(msg)
    return value


def _names(value: Any, name: str) -> Iterator[tuple[str, Slot]]:
    if isinstance(value, Slot):
        yield name, value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _names(part, f"{name}.{key}")
    if isinstance(value, list | tuple):
        for key, part in enumerate(value):
            yield from _names(part, f"{name}.{key}")


def _filled(value: Any, values: Sequence[Any], *, settings: bool = True) -> Any:
    if isinstance(value, Slot):
        return values[value.number]
    if isinstance(value, Mapping):
        return {key: _filled(part, values, settings=settings) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_filled(part, values, settings=settings) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value if settings else None


def _parts(returned: Any) -> dict[Any, Any]:
    """What lies in a thing that a model returns, by key or position."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, list | tuple):
        return {**dict(enumerate(returned)), **(returned._asdict() if hasattr(returned, "_asdict") else {})}
    if is_dataclass(returned):
        return {f.name: getattr(returned, f.name) for f in fields(returned)}
    return {}


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return "one tensor"
    return f"the names {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"{len(x)} arguments"
