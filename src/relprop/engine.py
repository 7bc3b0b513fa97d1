"""The verbs of the engine: plan and explain.

A model is traced once and its plans are kept, for as long as the model lives and stays as it was; every call looks
whether it did.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from relprop import operators, plans, requests
from relprop.errors import RelpropError
from relprop.graph import Graph
from relprop.ledger import Ledger
from relprop.merges import Shares, Split
from relprop.plans import Override, Plan
from relprop.result import Explanation
from relprop.rules import Rule
from relprop.state import State, undisturbed
from relprop.sweep import Record, Sweep
from relprop.trace import TraceError, answer, trace

AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-8}
"""How far the sweep's output may lie from the model's own, relative to the largest value."""


@dataclass
class _Known:
    """What is known of a model in one state: its graph, and the plans made of it with the shapes they were tried on."""

    state: State
    graph: Graph
    words: dict[Any, Any] = field(default_factory=lambda: dict(operators.TABLE))
    sweeps: dict[Any, Sweep] = field(default_factory=dict)
    shapes: dict[Any, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    verified: set[Any] = field(default_factory=set)


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_LOCK = threading.RLock()


def plan(
    model: Any,
    x: Tensor | None = None,
    *,
    preset: str = "paper",
    split: str | Split | Shares | None = None,
    identity_skips: bool = True,
    overrides: Mapping[Any, Override] | None = None,
) -> Plan:
    """Tells, before anything runs, which rule or split every node of a model gets.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        x: An input; with it the plan knows all shapes.
        preset: Name of a preset.
        split: Split at merges, instead of the preset's: a name, or a function from the branches to their shares.
        identity_skips: Whether identity skips get relevance.
        overrides: From a name pattern (``"layer4.*"``), a module type or a block number to what is to be done there:
            a rule, a split, a stand-in for a max pool, ``"fold"`` or ``"pass"`` for a batch norm; later ones win.

    Returns:
        The plan; ``print`` shows a line a node.

    Raises:
        RelpropError: If the model cannot be traced, or something in it has no rule.
    """
    module = requests.module(model)
    with _computing(requests.device(module)):
        if x is not None:
            requests.check_input(x, module)
        known = _known(module, x)
        key, sweep = _sweep(known, preset, split, identity_skips, overrides, requests.pixels(model))
        if x is None:
            return sweep.plan
        return replace(sweep.plan, shapes=_shapes(known, key, sweep, x))


def explain(
    model: Any,
    x: Tensor,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    preset: str = "paper",
    split: str | Split | Shares | None = None,
    identity_skips: bool = True,
    overrides: Mapping[Any, Override] | None = None,
    start: str | Tensor = "probability",
    layers: Sequence[str] = (),
    strict: bool = False,
) -> Explanation:
    """Explains a model's output for each input of a batch.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        x: A batch of inputs.
        target: The class to explain: None for the predicted one, a number for all samples, a list or ``(B,)`` tensor
            with one a sample, a ``(B, T)`` tensor for several of each sample.
        preset: See :func:`plan`, as for ``split``, ``identity_skips`` and ``overrides``.
        split: As there.
        identity_skips: As there.
        overrides: As there.
        start: What the target starts with: ``"probability"``, ``"logit"``, ``"one"``, a tensor shaped like the
            target, or one shaped like the output for a start at every class. Where the output is a map, a target
            starts at all pixels that are predicted to be of its class (at all there are, if none is), and a tensor
            shaped like the output at a set of the user's own.
        layers: Names of modules at whose inputs the relevance is to be kept, for ``relevance_at``.
        strict: Whether to raise at the first leak that no cause explains.

    Returns:
        The explanation.

    Raises:
        RelpropError: If the request cannot be met; the message names the thing and the remedy.
    """
    module = requests.module(model)
    requests.check_input(x, module)
    with _computing(x.device):
        known = _known(module, x)
        key, sweep = _sweep(known, preset, split, identity_skips, overrides, requests.pixels(model))
        shapes = _shapes(known, key, sweep, x)
        targets = requests.targets(target, shapes[-1])
        wanted = requests.layers(layers, sweep.plan.graph)
        beginning = requests.start(start, targets, shapes[-1])
        record = sweep.forward(x.detach())
        _verify(known, (sweep.folded, x.shape), module, x, record)
        output = record.output.clone()  # a model may return its input, which is the user's
        targets = requests.predicted(output) if targets is None else targets.to(output.device)
        relevance, scale = beginning(output, targets)
        several = targets.ndim == 2
        result, caught, ledger = sweep.back(record, relevance, scale, layers=wanted, several=several, strict=strict)
        _check_finite(result, ledger)

        def user(r: Tensor) -> Tensor:
            scaled = r * scale.to(r.dtype).reshape(*scale.shape, *[1] * (r.ndim - 2))
            return (scaled.movedim(0, 1) if several else scaled[0]).contiguous()

        begun = (ledger.start * scale).T.to(output.dtype)
        return Explanation(
            relevance=user(result),
            target=targets,
            start=begun if several else begun[:, 0],
            output=output,
            ledger=ledger,
            layers={call: user(r) for call, r in caught.items()},
            settings={**sweep.plan.settings, "start": start if isinstance(start, str) else "tensor"},
        )


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """No gradients are recorded, and an autocast around the call does not reach inside."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _known(module: nn.Module, x: Tensor | None) -> _Known:
    """The model's graph, traced anew if the model, or the vocabulary, is not as it was."""
    with _LOCK:
        known = _KNOWN.get(module)
        fits = known is not None and (known.graph.shape is None or x is None or known.graph.shape == x.shape)
        if known is None or not fits or known.words != operators.TABLE or not known.state.holds(module):
            known = _KNOWN[module] = _Known(State(module), _traced(module, x))
        return known


def _traced(module: nn.Module, x: Tensor | None) -> Graph:
    """A graph for all shapes; or, where the model's code needs to know the shape, for that of an input."""
    try:
        graph = trace(module)
    except TraceError:
        if x is None:
            raise
    else:
        opaque = [graph.nodes[i] for i in graph.reached() if isinstance(graph.nodes[i].operator, operators.Unknown)]
        if x is None or not opaque:
            return graph
    try:
        return trace(module, x)
    except TraceError:
        return trace(module)  # whose complaint is about the model as it is for all shapes


def _sweep(known: _Known, *request: Any) -> tuple[Any, Sweep]:
    preset, split, identity_skips, overrides, pixels = request
    requests.check_plan(preset, split, identity_skips, overrides)
    key = (preset, split, identity_skips, tuple((overrides or {}).items()), pixels)
    if any(callable(value) and not isinstance(value, Rule | Split) for value in (split, *(overrides or {}).values())):
        # A user's function may hold on to anything, even to the model: its plan is made anew each time.
        return None, Sweep(plans.make(known.graph, *request))
    if key not in known.sweeps:
        known.sweeps[key] = Sweep(plans.make(known.graph, *request))
    return key, known.sweeps[key]


def _shapes(known: _Known, key: Any, sweep: Sweep, x: Tensor) -> tuple[tuple[int, ...], ...]:
    """The shape of every node's value, worked out without computing any, once for each shape of the input."""
    if key is None:
        return sweep.shapes(x)
    key = (key, x.shape, x.dtype)
    if key not in known.shapes:
        known.shapes[key] = sweep.shapes(x)
    return known.shapes[key]


def _verify(known: _Known, key: Any, module: nn.Module, x: Tensor, record: Record) -> None:
    """Refuses an output that is not finite, or not the model's own; the latter once for each shape."""
    if not torch.isfinite(record.output).all():
        bad = int((~torch.isfinite(record.output)).flatten(1).any(1).nonzero()[0])
        msg = (
            f"The model's output for sample {bad} is not finite, so there is nothing to explain; check its weights "
            "and the input's scale."
        )
        raise RelpropError(msg)
    if key in known.verified:
        return
    with undisturbed(module):
        torch.rand(1)  # so that a model that draws at random does not draw what it drew when it was traced
        expected = answer(module(x.detach().clone()))
    difference = float((record.output - expected).abs().max())
    allowed = AGREEMENT[x.dtype] * max(float(expected.abs().max()), 1e-6)
    if not difference <= allowed:
        msg = (
            f"The traced graph of {type(module).__name__} computes something else than the model (outputs differ by "
            f"{difference:.2g}), so it is not explained; code that draws at random, branches on values or writes into "
            "views cannot be traced."
        )
        raise RelpropError(msg)
    known.verified.add(key)


def _check_finite(result: Tensor, ledger: Ledger) -> None:
    if torch.isfinite(result).all():
        return
    where = next((c for (c, _), (amount, _) in ledger.edges.items() if not torch.isfinite(amount).all()), 0)
    msg = (
        f"Relevance is no longer finite at {ledger.nodes[where]}: a split of your own gave shares that are not, or "
        "denominators cancel under the rule there; use float64, or a preset that conserves, such as 'paper'."
    )
    raise RelpropError(msg)
