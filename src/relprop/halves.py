"""Half precision: models whose weights are too coarse for relevance to add up.

Such a model is explained by a twin with the same weights in float32; the model itself is not touched. Its own output is
compared with the twin's as closely as half precision allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from relprop.errors import RelpropError
from relprop.forms import Form
from relprop.requests import HALVES, held


def is_half(model: nn.Module) -> bool:
    """Whether a model's weights have half precision."""
    return any(t.dtype in HALVES for t in held(model))


def twin(model: nn.Module) -> nn.Module:
    """The model itself, or, if it has half precision, a copy in float32.

    Raises:
        RelpropError: If it cannot be copied.
    """
    if not is_half(model):
        return model
    try:
        return deepcopy(model).float()
    except Exception as error:  # whatever a module holds that does not let itself be copied
        reason = str(error).strip().split("\n")[0].rstrip(".")
        msg = (
            f"{type(model).__name__} has half precision and cannot be copied to float32 ({reason}); convert it with "
            "model.float()."
        )
        raise RelpropError(msg) from error


def answer(model: nn.Module, form: Form, given: Sequence[Tensor]) -> Tensor:
    """The model's own output for copies of some inputs.

    Not every processor computes in bfloat16, and not every operator in float16: there, the twin's.
    """
    copies = [x.detach().clone() for x in given]
    coarse = {t.dtype for t in held(model)} & set(HALVES)
    output: Tensor | None = None
    if torch.bfloat16 not in coarse:
        try:
            output = form.answer(form.call(model, copies))
        except RuntimeError:
            if not coarse:
                raise
    if output is None:
        output = form.answer(form.call(twin(model), [x.float() if x.dtype in HALVES else x for x in copies]))
    return output
