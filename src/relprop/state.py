"""The state of a model: what must not have changed since it was traced, and must not change while we look."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SMALL = 4096
"""Numbers in a tensor up to which all of them are remembered, which is quicker than to sum them up."""

_ROW = 32
"""Words that are summed up at a time: those of 64 weights, fewer than most filters have."""

_DEPTH = 3
"""How far a module's settings are followed, from an object or a list to what it holds."""

_REGISTERED = ("_parameters", "_buffers", "_modules")


class State:
    """Remembers a model's tensors and settings well enough to notice that they changed.

    Every tensor is known by its memory and its version, which ``load_state_dict``, an optimiser's step and ``.to(...)``
    change. Writes that torch does not count (through ``.data`` or numpy) are noticed by sums of bits, row by row, and
    by some of the values themselves, since a sum does not see that two have changed places. Every module is known by
    its type, its hooks and its settings, such as a stride; so are modules that hide in lists, and what objects hold.

    Args:
        model: The model; no reference to it is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._facts, modules = _survey(model)
        held = (t for m in modules for t in (*_tensors(m), *(v for v in vars(m).values() if isinstance(v, Tensor))))
        tensors = [t.detach() for t in held if t.is_floating_point() and t.numel()]
        dense = [_memory(t) for t in tensors if _is_dense(t)]
        self._small: dict[torch.dtype, list[Tensor]] = {}
        for bits in dense:
            if len(bits) <= _SMALL:
                self._small.setdefault(bits.dtype, []).append(bits)
        self._large = [bits for bits in dense if len(bits) > _SMALL]
        self._others = [t for t in tensors if not _is_dense(t)]
        self._then = self._values()

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is still as it was."""
        return _survey(model)[0] == self._facts and torch.equal(self._values(), self._then)

    def _values(self) -> Tensor:
        memory = [*self._large, *(_memory(t.contiguous()) for t in self._others)]
        sums = [part for bits in memory for part in (*_sums(bits), _sample(bits))]
        whole = [torch.cat(bits).to(torch.int64) for bits in self._small.values()]
        return torch.cat([*whole, *sums, torch.zeros(0, dtype=torch.int64)])


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Takes back what the model's own code stores on the model, or draws from torch's generator, in the meantime."""
    before = [(vars(m), dict(vars(m))) for m in model.modules()]
    # Parameters, buffers and modules are in dictionaries, and so is what some models remember of the last call.
    before += [(value, dict(value)) for m in model.modules() for value in vars(m).values() if isinstance(value, dict)]
    buffers = [(b, _fact(b), b.detach().clone()) for b in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for buffer, fact, value in buffers:  # which a model may count its calls in
                if _fact(buffer) != fact or (buffer.is_inference() and not torch.equal(buffer, value)):
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(value)
            for now, then in before:
                for name in now.keys() - then.keys():
                    del now[name]
                now.update({name: value for name, value in then.items() if now.get(name) is not value})


def _tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


_PLAIN = frozenset((bool, int, float, str, type(None)))


def _survey(model: nn.Module) -> tuple[list[Hashable], list[nn.Module]]:
    """What is known of a model and of the modules in it, those in plain lists too; and these modules."""
    facts: list[Hashable] = []
    modules, seen = [model], {id(model)}
    for module in modules:  # which grows on the way
        found = [*module._modules.values()]
        facts += [id(type(module)), *module._modules, *map(_fact, _tensors(module))]
        for key, value in vars(module).items():
            if value.__class__ in _PLAIN:
                facts += (key, value)
            elif key not in _REGISTERED and not (isinstance(value, dict) and not value):  # most hooks are none
                facts += (key, _fact(value, found))
        for each in found:
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                modules.append(each)
    return facts, modules


def _fact(value: Any, modules: list[nn.Module | None] | None = None, depth: int = _DEPTH) -> Hashable:
    """Something that differs when the value does; modules that are met in it are added to a list."""
    plain: Hashable = value if value.__class__ in _PLAIN else id(value)
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return value.data_ptr(), version, value.dtype, value.shape, value.stride()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, zlib.crc32(value.tobytes())
    if isinstance(value, nn.Module) and modules is not None:
        modules.append(value)
    elif depth and isinstance(value, dict):
        return tuple((id(k), _fact(v, modules, depth - 1)) for k, v in value.items())
    elif depth and isinstance(value, tuple | list | set | frozenset):
        return tuple(_fact(v, modules, depth - 1) for v in value)
    elif depth and hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType):
        return plain, _fact(vars(value), modules, depth - 1)
    return plain


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _memory(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor, as they lie in memory: a view of whole numbers, the longest that fit."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    size = flat.element_size()
    words = (torch.int64, torch.int32, torch.int16, torch.int8)
    fits = (w for w in words if len(flat) * size % w.itemsize == 0 and flat.storage_offset() * size % w.itemsize == 0)
    return flat.view(next(w for w in fits if w.itemsize >= size or size % w.itemsize == 0))


def _sums(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of rows of words, as quick to be had as one of all, and what is left behind the last row."""
    whole = len(bits) // _ROW * _ROW
    return bits[:whole].view(-1, _ROW).sum(1), bits[whole:].to(torch.int64)


def _sample(bits: Tensor, count: int = 32) -> Tensor:
    """Some elements, spread over the memory; an odd step walks through all columns of a matrix."""
    count = min(count, len(bits))
    step = len(bits) // count
    step -= step > 1 and step % 2 == 0
    return bits[: count * step : step].to(torch.int64)
