"""The state of a model: what must not have changed since it was traced, and must not change while we look."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_REGISTERED = ("_parameters", "_buffers", "_modules")


class State:
    """Remembers a model's tensors and settings well enough to notice that they changed.

    Every tensor is known by its memory and its version, which ``load_state_dict``, an optimiser's step and ``.to(...)``
    change; writes that torch does not count (through ``.data`` or numpy) are noticed by a sample of each tensor's
    values. Every module is known by its type, its hooks and its settings, such as a stride.

    Args:
        model: The model; no reference to it is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._facts = _facts(model)
        self._views = [_sample(t) for m in model.modules() for t in _tensors(m) if t.is_floating_point()]
        self._sample = self._values()

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is still as it was."""
        return _facts(model) == self._facts and torch.equal(self._values(), self._sample)

    def _values(self) -> Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Takes back what the model's own code stores on the model, or draws from torch's generator, in the meantime."""
    before = [(vars(m), dict(vars(m))) for m in model.modules()]
    before += [(vars(m)[name], dict(vars(m)[name])) for m in model.modules() for name in _REGISTERED]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
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


def _sample(tensor: Tensor, count: int = 64) -> Tensor:
    """A view of some elements, spread over the tensor's memory."""
    tensor = tensor.detach()
    dense = tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    if not dense or not tensor.numel():
        return tensor.flatten()[:count].clone()
    count = min(count, tensor.numel())
    # An odd step walks through all columns of a matrix whose width is a power of two.
    step = tensor.numel() // count
    step -= step > 1 and step % 2 == 0
    return tensor.as_strided((count,), (step,))
