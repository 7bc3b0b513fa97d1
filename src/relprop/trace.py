"""Tracing: from a model to its graph.

``torch.fx`` records what the model's ``forward`` does with one symbolic input, so nothing here knows an architecture:
sums are sums wherever they are written, a module that is called three times gives three nodes, and code that runs in
place is rewritten to its safe twin.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor, nn

from relprop import (
    activations,
    attention,
    embeddings,
    forms,
    gates,
    norms,
    recurrent,
    shapes,
    upsampling,
    vocabulary,
)
from relprop.errors import RelpropError
from relprop.forms import Form
from relprop.graph import Graph
from relprop.recording import Recording, made
from relprop.state import undisturbed
from relprop.tracers import ShapedTracer, Tracer

FAMILIES = (vocabulary, activations, shapes, gates, norms, attention, recurrent, upsampling, embeddings)
"""The rooms that register operators: all of torch's words that are known."""

TRACING = threading.RLock()
"""fx traces one model at a time in a process."""


def trace(
    model: nn.Module, form: Form | None = None, tensors: Sequence[Tensor] | None = None, *, hooked: bool = False
) -> Graph:
    """Traces a model.

    Args:
        model: The model, in evaluation mode.
        form: How it is called; with one tensor, if not told.
        tensors: Inputs, for code that cannot be traced without knowing shapes; the graph is then good for theirs only.
        hooked: Whether the user's hooks on its modules are part of it.

    Returns:
        Its graph.

    Raises:
        RelpropError: If its code cannot be traced.
    """
    form = form or forms.plain(model)
    tracer = Tracer(form, hooked) if tensors is None else ShapedTracer(form, hooked, model, tensors)
    # Tracing runs the model's own code, which may store what it computes on the model, or draw at random.
    with TRACING, undisturbed(model):
        try:
            recorded = tracer.trace(model)
        except RelpropError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            msg = (
                f"{type(model).__name__} cannot be traced by torch.fx ({type(error).__name__}: {reason}); "
                "code that branches on values, or builds modules as it runs, has to move out of forward."
            )
            raise TraceError(msg) from error
        return made(model, Recording(recorded, tracer.around, tracer.kinds, {}, {}), form, tensors)


class TraceError(RelpropError):
    """A model whose code cannot be followed, in this way at least."""
