"""The state of a model: what must not have changed since it was traced."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


class State:
    """Remembers a model's tensors and settings well enough to notice that they changed.

    Every tensor is known by its memory and its version, which ``load_state_dict``, an optimiser's step and
    ``.to(...)`` change; writes that torch does not count (through ``.data`` or numpy) are noticed by a sample of each
    tensor's values. Every module is known by its type and its plain settings, such as a stride.

    Args:
        model: The model; no reference to it is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._facts = _facts(model)
        self._views = [_sample(tensor.detach()) for tensor in _tensors(model) if tensor.is_floating_point()]
        self._sample = self._values()

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is still as it was."""
        return _facts(model) == self._facts and torch.equal(self._values(), self._sample)

    def _values(self) -> Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [t for m in model.modules() for t in chain(m._parameters.values(), m._buffers.values()) if t is not None]


def _facts(model: nn.Module) -> tuple[Any, ...]:
    tensors = [
        (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.shape, t.stride()) for t in _tensors(model)
    ]
    modules = [
        (type(m), *[(k, v) for k, v in vars(m).items() if isinstance(v, bool | int | float | str | tuple | None)])
        for m in model.modules()
    ]
    return tensors, modules, [name for name, _ in model.named_modules()]


def _sample(tensor: Tensor, count: int = 32) -> Tensor:
    """A view of some elements, spread over the tensor's memory."""
    dense = tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    if not dense or not tensor.numel():
        return tensor.flatten()[:count].clone()
    count = min(count, tensor.numel())
    return tensor.as_strided((count,), (tensor.numel() // count,))
