"""The state of a model: what must not have changed since it was traced, and must not change while we look."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 4096
"""Numbers in a tensor up to which all of them are remembered, which is quicker than to sum them up."""

_REGISTERED = ("_parameters", "_buffers", "_modules")


class State:
    """Remembers a model's tensors and settings well enough to notice that they changed.

    Every tensor is known by its memory and its version, which ``load_state_dict``, an optimiser's step and ``.to(...)``
    change. Writes that torch does not count (through ``.data`` or numpy) are noticed by the sum of all bits, and by
    some of the values themselves, since a sum does not see that two have changed places. Every module is known by its
    type, its hooks and its settings, such as a stride.

    Args:
        model: The model; no reference to it is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._facts = _facts(model)
        tensors = [t.detach() for m in model.modules() for t in _tensors(m) if t.is_floating_point() and t.numel()]
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
        return _facts(model) == self._facts and torch.equal(self._values(), self._then)

    def _values(self) -> Tensor:
        memory = [*self._large, *(_memory(t.contiguous()) for t in self._others)]
        sums = [torch.stack([bits.sum() for bits in memory])] if memory else []
        whole = [torch.cat(bits).to(torch.int64) for bits in self._small.values()]
        return torch.cat([*whole, *sums, *(_sample(bits) for bits in memory), torch.zeros(0, dtype=torch.int64)])


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


def _facts(model: nn.Module) -> list[Hashable]:
    facts: list[Hashable] = []
    for name, module in model.named_modules():
        facts += [name, id(type(module)), *map(_fact, _tensors(module))]
        for key, value in vars(module).items():
            if value.__class__ in _PLAIN:
                facts += (key, value)
            elif key not in _REGISTERED and not (isinstance(value, dict) and not value):  # most hooks are none
                facts += (key, _fact(value))
    return facts


def _fact(value: Any) -> Hashable:
    """Something that differs when the value does."""
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return value.data_ptr(), version, value.dtype, value.shape, value.stride()
    if isinstance(value, dict):
        return tuple((id(k), _fact(v)) for k, v in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_fact, value))
    return value if value.__class__ in _PLAIN else id(value)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _memory(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor, as they lie in memory: a view of whole numbers, the longest that fit."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    size = flat.element_size()
    words = (torch.int64, torch.int32, torch.int16, torch.int8)
    fits = (w for w in words if len(flat) * size % w.itemsize == 0 and flat.storage_offset() * size % w.itemsize == 0)
    return flat.view(next(w for w in fits if w.itemsize >= size or size % w.itemsize == 0))


def _sample(bits: Tensor, count: int = 32) -> Tensor:
    """Some elements, spread over the memory; an odd step walks through all columns of a matrix."""
    count = min(count, len(bits))
    step = len(bits) // count
    step -= step > 1 and step % 2 == 0
    return bits[: count * step : step].to(torch.int64)
