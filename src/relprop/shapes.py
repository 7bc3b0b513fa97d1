"""Shapes: operators whose elements come from their inputs, at other places.

Slices, concatenations, shuffles, rolls, repetitions and padding all copy. So relevance goes back to where an element
was copied from, and is summed where it was copied more than once; what falls on padding or on a constant stays there,
by that name. Nothing is lost, whatever the function: it is asked where its elements come from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.operators import Constant, Operator, Ref, Several, Total, bound, refs, register
from relprop.rules import Handed

_FIRST = 2.0**40
"""What the first element is called when a function is asked where it puts them: no constant has such values."""


@dataclass(eq=False)
class Moved(Operator):
    """A function that copies elements of its inputs, with constants between them.

    Attributes:
        function: The function, of tensors and of numbers that come from shapes.
        sources: Positions of the inputs that it copies from; None for all tensors. The others say where to.
        cause: What constants in between are called in the ledger.
    """

    function: Callable[..., Tensor]
    sources: tuple[int, ...] | None = None
    cause: str = "constant"

    @property
    def heirs(self) -> tuple[int, ...]:
        return super().heirs if self.sources is None else self.sources

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def probe(self, *values: Any) -> Tensor:
        return self.function(*values)

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:
        tensors = [k for k in self.heirs if isinstance(values[k], Tensor)]
        written = self._written(r, values, tensors[0]) if len(tensors) == 1 else None
        if written is not None:
            return Handed(tuple(written if k == tensors[0] else None for k in range(len(values))), {})
        return self._traced(r, values, tensors, total)

    def _written(self, r: Tensor, values: Sequence[Any], source: int) -> Tensor | None:
        """Writes through the view that the function makes of its input; None where it makes none."""
        result = r.new_zeros((len(r), *values[source].shape))
        for whole, part in zip(result, r, strict=True):
            view = self.function(*values[:source], whole, *values[source + 1 :])
            same = view.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            if not same or 0 in view.stride() or view.numel() > whole.numel():
                return None
            view.add_(part)
        return result

    def _traced(self, r: Tensor, values: Sequence[Any], tensors: Sequence[int], total: Total) -> Handed:
        """Numbers all elements of the inputs, and follows the numbers."""
        numbers, named = list(values), 0
        for k in tensors:
            count = values[k].numel()
            numbered = torch.arange(named, named + count, dtype=torch.float64, device=r.device) + _FIRST
            numbers[k] = numbered.reshape(values[k].shape)
            named += count
        came = self.function(*numbers) - _FIRST
        foreign = ~((came >= 0) & (came < named))
        index = came.masked_fill(foreign, named).long().flatten()
        # One place more, for all that comes from nowhere.
        flat = r.new_zeros(len(r), named + 1).index_add_(1, index, r.flatten(1))
        parts = iter(flat[:, :named].split([values[k].numel() for k in tensors], dim=1))
        handed = {k: next(parts).reshape(len(r), *values[k].shape) for k in tensors}
        absorbed = {self.cause: total(r * foreign)} if foreign.any() else {}
        return Handed(tuple(handed.get(k) for k in range(len(values))), absorbed)


@dataclass(eq=False)
class Joined(Operator):
    """Tensors side by side (``torch.cat``) or along a new axis (``torch.stack``): relevance goes back by slice.

    Attributes:
        parts: What is joined: the number of an input, or a constant.
        axis: Along which axis.
        new: Whether it is a new one.
    """

    parts: tuple[int | Tensor, ...]
    axis: int
    new: bool

    def forward(self, *values: Any) -> Any:
        return self._join([values[p] if isinstance(p, int) else p for p in self.parts])

    def shape(self, *values: Any) -> Any:
        return self._join([values[p] if isinstance(p, int) else p.to("meta") for p in self.parts])

    def probe(self, *values: Any) -> Tensor:
        return self._join([values[p] if isinstance(p, int) else torch.full_like(p, torch.nan) for p in self.parts])

    def _join(self, parts: list[Tensor]) -> Tensor:
        return (torch.stack if self.new else torch.cat)(parts, self.axis)

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:
        parts = [values[p] if isinstance(p, int) else p for p in self.parts]
        axis = self.axis % (r.ndim - 1)
        sizes = [1 if self.new else part.shape[axis] for part in parts]
        handed: list[Tensor | None] = [None] * len(values)
        constant: Tensor | None = None
        for p, size, end in zip(self.parts, sizes, accumulate(sizes), strict=True):
            share = r.narrow(axis + 1, end - size, size)
            if isinstance(p, int):
                share = share.squeeze(axis + 1) if self.new else share
                before = handed[p]
                handed[p] = share if before is None else before + share
            else:
                kept = torch.zeros_like(r)
                kept.narrow(axis + 1, end - size, size).copy_(share)
                constant = kept if constant is None else constant + kept
        return Handed(tuple(handed), {} if constant is None else {"constant": total(constant)})


@dataclass(eq=False)
class Largest(Operator):
    """The largest element along some axes: winner takes all, evenly among those that tie."""

    axes: tuple[int, ...]
    keep: bool
    looks = True

    def forward(self, *values: Any) -> Any:
        return torch.amax(values[0], self.axes, keepdim=self.keep)

    def probe(self, *values: Any) -> Tensor:
        return torch.mean(values[0], self.axes, keepdim=self.keep)

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        a: Tensor = values[0]
        if not self.keep:
            for axis in sorted(axis % a.ndim for axis in self.axes):
                r = r.unsqueeze(axis + 1)
        best = a == a.amax(self.axes, keepdim=True)
        return Handed((r * (best / best.sum(self.axes, keepdim=True)),), {})


# -- their spellings --


@register(torch.amax, "amax")
def _amax(x: Ref, dim: Any = None, keepdim: bool = False) -> Operator:
    if dim is None:
        msg = "the largest of all elements, whichever sample they are in"
        raise TypeError(msg)
    return Largest("amax", (x,), (dim,) if isinstance(dim, int) else tuple(dim), keepdim)


@register(torch.max, "max")
def _max(x: Ref, dim: Any = None, keepdim: bool = False) -> Operator:
    if not isinstance(dim, int):
        msg = "a maximum of two tensors"
        raise TypeError(msg)

    def part(k: int) -> Operator:
        if k:
            return Constant("argmax", (x,), lambda value: value.argmax(dim, keepdim))
        return _amax(x, dim, keepdim)

    return Several("max", (x,), lambda value: torch.max(value, dim, keepdim), part)


def move(function: Callable[..., Tensor], x: Ref, *args: Any, **kwargs: Any) -> Operator:
    """An operator that copies from its first argument; all others say where to."""
    inputs = tuple(refs(((x, *args), kwargs)))
    cause = "padding" if "pad" in function.__name__ else "constant"
    label = function.__name__.strip("_")
    return Moved(label, inputs, bound(function, (x, *args), kwargs), (0,), cause)


for _name in (
    "narrow", "select", "roll", "flip", "fliplr", "flipud", "rot90", "expand", "expand_as", "broadcast_to", "repeat",
    "tile", "repeat_interleave", "unfold", "index_select", "gather", "take_along_dim", "diagonal", "ravel",
):  # fmt: skip
    _targets = (getattr(torch, _name),) if hasattr(torch, _name) else ()
    register(_name, *_targets, numbers=True)(partial(move, getattr(Tensor, _name)))
for _function in (F.pad, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, F.unfold):
    register(_function, numbers=True)(partial(move, _function))
register(torch.pixel_shuffle)(partial(move, F.pixel_shuffle))
register(torch.channel_shuffle)(partial(move, F.channel_shuffle))
register(nn.PixelShuffle)(lambda m, x: move(F.pixel_shuffle, x, m.upscale_factor))
register(nn.PixelUnshuffle)(lambda m, x: move(F.pixel_unshuffle, x, m.downscale_factor))
register(nn.ChannelShuffle)(lambda m, x: move(F.channel_shuffle, x, m.groups))
register(nn.Unfold)(lambda m, x: move(F.unfold, x, m.kernel_size, m.dilation, m.padding, m.stride))

_MODES = {"Zero": "constant", "Constant": "constant", "Reflection": "reflect", "Replication": "replicate"}
for _axes in (1, 2, 3):
    for _kind, _mode in (*_MODES.items(), ("Circular", "circular")):
        register(getattr(nn, f"{_kind}Pad{_axes}d"))(
            lambda m, x, mode=_mode: move(
                F.pad, x, tuple(m.padding), mode, **({"value": m.value} if hasattr(m, "value") else {})
            )
        )


@register(operator.getitem, numbers=True)
def _getitem(x: Ref, index: Any) -> Operator:
    return move(operator.getitem, x, index)


def assigned(whole: Tensor, where: Any, what: Any) -> Tensor:
    """What ``whole[where] = what`` leaves, in a tensor of its own."""
    whole = whole.clone()
    whole[where] = what
    return whole


@register(operator.setitem, numbers=True)
def _setitem(x: Ref, index: Any, value: Any) -> Operator:
    inputs = refs((x, index, value))
    sources = (0, len(inputs) - 1) if isinstance(value, Ref) else (0,)
    return Moved("setitem", tuple(inputs), bound(assigned, (x, index, value), {}), sources)


def _scatter(function: Callable[..., Tensor], x: Ref, src: Any, *args: Any, **kwargs: Any) -> Operator:
    inputs = tuple(refs(((x, src, *args), kwargs)))
    return Moved(function.__name__, inputs, bound(function, (x, src, *args), kwargs), tuple(range(len(inputs))))


for _name in ("select_scatter", "slice_scatter"):
    register(getattr(torch, _name), _name)(partial(_scatter, getattr(torch, _name)))


def _several(function: Callable[..., Sequence[Tensor]], *args: Any, **kwargs: Any) -> Operator:
    inputs, call = tuple(refs((args, kwargs))), bound(function, args, kwargs)
    label = function.__name__

    def part(k: int) -> Operator:
        def one(*values: Any) -> Tensor:
            tensor: Tensor = call(*values)[k]
            return tensor

        return Moved(label, inputs, one, (0,))

    return Several(label, inputs, call, part)


for _name in ("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split"):
    register(_name, getattr(torch, _name), numbers=True)(partial(_several, getattr(Tensor, _name)))
register(torch.functional.split)(partial(_several, Tensor.split))


@register(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> Operator:
    return _joined("cat", tensors, dim if axis is None else axis, new=False)


@register(torch.stack)
def _stack(tensors: Sequence[Any], dim: int = 0) -> Operator:
    return _joined("stack", tensors, dim, new=True)


def _joined(label: str, tensors: Sequence[Any], axis: int, *, new: bool) -> Operator:
    if isinstance(tensors, Ref):  # all that another call returned, of unknown number
        msg = f"{label} of a list that is not written out"
        raise TypeError(msg)
    inputs = list(dict.fromkeys(refs(list(tensors))))
    parts = tuple(inputs.index(t) if isinstance(t, Ref) else t for t in tensors)
    return Joined(label, tuple(inputs), parts, axis, new)
