"""Exporting: what torch.fx cannot follow, torch.export can."""

from __future__ import annotations
from collections.abc import Sequence
from torch import Tensor, nn
from relprop.forms import Form
from relprop.graph import Graph
from relprop.trace import TraceError


def trace(model: nn.Module, form: Form, tensors: Sequence[Tensor], *, hooked: bool = False) -> Graph:
    raise TraceError("not yet")
