"""The verbs of the engine: plan and explain.

A model is traced once and its plans are kept, for as long as the model lives and stays as it was; every call looks
whether it did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from relprop import concepts, export, forms, halves, hooks, operators, plans, presets, requests, starts
from relprop.errors import RelpropError
from relprop.forms import Form, Output
from relprop.forward import Record
from relprop.graph import Graph
from relprop.ledger import Ledger
from relprop.merges import Shares, Split
from relprop.plans import Override, Plan
from relprop.precision import Autocast, precision
from relprop.result import Explanation
from relprop.rules import Rule
from relprop.state import State, undisturbed
from relprop.sweep import Sweep
from relprop.trace import TraceError, trace

Tensors = tuple[Tensor, ...]

AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-8, torch.float16: 2e-2}
"""How far the sweep's output may lie from the model's own, relative to the largest value."""
COARSE = 5e-2
"""The same under autocast."""


@dataclass
class _Known:
    """What is known of a model in one state, called in one form: its graph, and the plans made of it.

    With the plans go the shapes that they were tried on; ``kinds`` are those of the inputs that it was traced with, and
    ``hooks`` the modules with hooks of the user's own, which are a part of the graph where it is ``hooked``.
    """

    state: State
    form: Form
    kinds: Any
    graph: Graph
    hooks: list[str]
    hooked: bool = False
    words: dict[Any, Any] = field(default_factory=lambda: dict(operators.TABLE))
    sweeps: dict[Any, Sweep] = field(default_factory=dict)
    shapes: dict[Any, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    verified: set[Any] = field(default_factory=set)


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_LOCK = threading.RLock()


def plan(
    model: Any,
    x: Any = None,
    *,
    preset: str = "relprop",
    split: str | Split | Shares | None = None,
    identity_skips: bool = True,
    overrides: Mapping[Any, Override] | None = None,
    layer: str | None = None,
    output: Output = None,
) -> Plan:
    """Tells, before anything runs, which rule or split every node of a model gets.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        x: An input, as in :func:`explain`; with it the plan knows all shapes.
        preset: Name of a preset.
        split: Split at merges, instead of the preset's: a name, or a function from the branches to their shares.
        identity_skips: Whether identity skips get relevance.
        overrides: From a name pattern (``"layer4.*"``), a module type or a block number to what is to be done there:
            a rule, a split, a stand-in for a max pool, ``"fold"`` or ``"pass"`` for a batch norm; later ones win.
        layer: See :func:`explain`, as for ``output``.
        output: As there.

    Returns:
        The plan; ``print`` shows a line a node.

    Raises:
        RelpropError: If the model cannot be traced, or something in it has no rule.
    """
    module = requests.module(model, halves=True)
    with _computing(requests.device(module)):
        form, given = (forms.plain(module, output), None) if x is None else requests.inputs(x, module, output)
        known = _known(module, form, given)
        key, sweep = _sweep(known, preset, split, identity_skips, overrides, requests.pixels(model), layer)
        if given is None:
            return sweep.plan
        return replace(sweep.plan, shapes=_shapes(known, key, sweep, _widened(given)))


def explain(
    model: Any,
    x: Any,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    preset: str = "relprop",
    split: str | Split | Shares | None = None,
    identity_skips: bool = True,
    overrides: Mapping[Any, Override] | None = None,
    start: str | Tensor | Callable[[Tensor], Tensor] | None = None,
    layer: str | None = None,
    output: Output = None,
    layers: Sequence[str] = (),
    strict: bool = False,
    recompute: bool = False,
    autocast: Autocast | None = None,
) -> Explanation:
    """Explains a model's output for each input of a batch.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        x: A batch of inputs: a tensor, a tuple with all arguments of the model in their order, or a dict with them by
            name. Whole numbers are looked up, such as tokens.
        target: The class to explain: None for the predicted one, a number for all samples, a list or ``(B,)`` tensor
            with one a sample, a ``(B, T)`` tensor for several of each sample. At a layer, a channel; None for the
            most active one.
        preset: See :func:`plan`, as for ``split``, ``identity_skips`` and ``overrides``.
        split: As there.
        identity_skips: As there.
        overrides: As there.
        start: What the target starts with: ``"probability"`` (the default of most presets), ``"contrast"`` (that,
            and what sets the class against the others, which sums to zero; the default of ``"relprop"``), ``"logit"``,
            ``"one"``, a tensor shaped like the target, or one shaped like the output for a start at every class, which
            may also be a function of the output. Where the output is a map, a target starts at all pixels that are
            predicted to be of its class (at all there are, if none is), and a tensor shaped like the output at a set of
            the user's own. At a layer: ``"value"`` (the default) or ``"one"`` at all places of a channel, or a tensor
            shaped like the layer's output for any neuron or region.
        layer: Name of a module, or of a node as ``print(plan)`` shows it, at whose output to start instead of the
            model's; ``"name#1"`` means its second call.
        output: Which of the tensors that the model returns to explain: a key or a position. Not needed for one that
            is alone, or called ``out`` or ``logits``.
        layers: Names of modules at whose inputs the relevance is to be kept, for ``relevance_at``; with ``:output``
            behind the name, at its output.
        strict: Whether to raise at the first leak that no cause explains.
        recompute: Whether to keep only some values between blocks and compute the others again on the way back: less
            memory, for large images and networks over volumes, at the price of one more forward pass.
        autocast: ``"bfloat16"`` or ``"tf32"``: fewer digits in convolutions, for accelerators that are faster with
            them. Relevance adds up less exactly then; ``ledger.error`` tells.

    Returns:
        The explanation.

    Raises:
        RelpropError: If the request cannot be met; the message names the thing and the remedy.
    """
    module = requests.module(model, halves=True)
    form, given = requests.inputs(x, module, output)
    with _computing(given[0].device, autocast):
        again = False
        while True:
            known = _known(module, form, given, hooked=again)
            key, sweep = _sweep(known, preset, split, identity_skips, overrides, requests.pixels(model), layer)
            xs = _widened(given)
            shapes = _shapes(known, key, sweep, xs)
            if start is None and layer is None and len(shapes[-1]) == 2:
                start = presets.PRESETS[preset].start
            place = _place(sweep.plan, shapes[-1], target, start)
            targets = requests.targets(target, place.shape, place.what)
            wanted = requests.layers(layers, sweep.plan.graph)
            beginning = starts.start(start, targets, place.shape, layer)
            record = sweep.forward(*xs, cuts=sweep.forward.cuts(shapes) if recompute else ())
            try:
                _verify(known, sweep, module, given, record, autocast)
                break
            except _HooksMatter as error:
                if again:
                    raise RelpropError(str(error)) from None
                again = True  # they are a part of the model, then; it is known with them, as they are now, from here on
                _KNOWN.pop(module, None)
        answer = record.output.clone()  # a model may return its input, which is the user's
        seen = answer.movedim(place.axis, 1)
        if targets is None:
            targets = requests.predicted(seen) if layer is None else concepts.strongest(seen)
        targets = targets.to(answer.device)
        relevance, scale = beginning(seen, targets)
        several = targets.ndim == 2
        relevance = relevance.movedim(2, place.axis + 1)
        results, caught, ledger = sweep.back(record, relevance, scale, layers=wanted, several=several, strict=strict)
        _check_finite(results, ledger)

        def user(r: Tensor) -> Tensor:
            scaled = r * scale.to(r.dtype).reshape(*scale.shape, *[1] * (r.ndim - 2))
            return (scaled.movedim(0, 1) if several else scaled[0]).contiguous()

        begun = (ledger.start * scale).T.to(answer.dtype)
        how = start if isinstance(start, str) else place.start if start is None else "function"
        how = "tensor" if isinstance(start, Tensor) else how
        named: dict[str, Any] = {"output": list(form.output)} if form.output else {}
        named |= {"autocast": autocast} if autocast else {}
        return Explanation(
            relevance=form.like([user(r) for r in results]),
            target=targets,
            start=begun if several else begun[:, 0],
            output=answer,
            ledger=ledger,
            layers={call: user(r) for call, r in caught.items()},
            settings={**sweep.plan.settings, "start": how, **named},
        )


@contextmanager
def _computing(device: torch.device, autocast: Autocast | None = None) -> Iterator[None]:
    """No gradients are recorded, an autocast around the call does not reach inside, and float32 is float32."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), precision(device, autocast):
        yield


def _known(module: nn.Module, form: Form, given: Tensors | None, *, hooked: bool = False) -> _Known:
    """The model's graph, traced anew if the model, its form, or the vocabulary is not as it was."""
    kinds = None if given is None else tuple((x.shape, x.dtype) for x in given)
    with _LOCK:
        known = _KNOWN.get(module)
        fits = (
            known is not None
            and known.form == form
            and (known.graph.shape is None or kinds in (None, known.kinds))
            and known.words == operators.TABLE
            and known.hooked >= hooked
        )
        if known is None or not fits or not known.state.holds(module):
            graph = _traced(halves.twin(module), form, None if given is None else _widened(given), hooked)
            known = _KNOWN[module] = _Known(State(module), form, kinds, graph, hooks.names(module), hooked)
        if given is not None:
            requests.check_whole(given, known.graph, module)
        return known


def _widened(given: Tensors) -> Tensors:
    """Inputs of half precision in float32, in which their models are explained."""
    return tuple(x.detach().float() if x.dtype in requests.HALVES else x.detach() for x in given)


def _traced(module: nn.Module, form: Form, xs: Tensors | None, hooked: bool) -> Graph:
    """A graph for all shapes; or, where the model's code needs to know them, for those of an input.

    What torch.fx cannot follow, or finds calls in that nothing is known of, goes to torch.export.
    """
    ways: list[Callable[..., Graph]] = [
        trace,
        *([] if xs is None else [partial(trace, tensors=xs), partial(export.trace, tensors=xs)]),
    ]
    graphs, complaints = [], []
    for way in ways:
        try:
            graphs.append(way(module, form, hooked=hooked))
        except TraceError as error:
            complaints.append(error)
            continue
        if not graphs[-1].unknown():
            return graphs[-1]
    if not graphs:
        raise complaints[0]
    return next((graph for graph in graphs if graph.shape), graphs[0])  # which has been looked into furthest


def _sweep(known: _Known, *request: Any) -> tuple[Any, Sweep]:
    preset, split, identity_skips, overrides, pixels, layer = request
    requests.check_plan(preset, split, identity_skips, overrides, layer)
    key = (preset, split, identity_skips, tuple((overrides or {}).items()), pixels, layer)
    if any(callable(value) and not isinstance(value, Rule | Split) for value in (split, *(overrides or {}).values())):
        # A user's function may hold on to anything, even to the model: its plan is made anew each time.
        return None, Sweep(plans.make(known.graph, *request))
    if key not in known.sweeps:
        known.sweeps[key] = Sweep(plans.make(known.graph, *request))
    return key, known.sweeps[key]


def _shapes(known: _Known, key: Any, sweep: Sweep, xs: Tensors) -> tuple[tuple[int, ...], ...]:
    """The shape of every node's value, worked out without computing any, once for each shape of the input."""
    if key is None:
        return sweep.forward.shapes(*xs)
    key = (key, *((x.shape, x.dtype) for x in xs))
    if key not in known.shapes:
        known.shapes[key] = sweep.forward.shapes(*xs)
    return known.shapes[key]


@dataclass
class _Place:
    """Where relevance starts: along which axis its classes or channels lie, and what to call them."""

    axis: int
    shape: tuple[int, ...]
    what: str
    start: str


def _place(plan: Plan, shape: tuple[int, ...], target: Any, start: Any) -> _Place:
    if plan.layer is None:
        return _Place(1, shape, "the model has {0} classes", "probability")
    axis = concepts.axis(plan.graph, len(shape))
    if axis is None:
        if target is not None or not isinstance(start, Tensor):
            msg = (
                f"Nothing tells along which axis of {shape} the channels of {plan.layer} lie; pass a start of that "
                "shape, with no target."
            )
            raise RelpropError(msg)
        axis = 1
    channels_second = (shape[0], shape[axis], *(n for k, n in enumerate(shape) if k not in (0, axis)))
    return _Place(axis, channels_second, f"{plan.layer} has {{0}} channels", "value")


class _HooksMatter(Exception):  # noqa: N818 - it is nobody's mistake
    """A model's outputs are not those of its graph, which was traced without the user's hooks, or as they once were."""


def _verify(
    known: _Known, sweep: Sweep, module: nn.Module, given: Tensors, record: Record, autocast: Autocast | None
) -> None:
    """Refuses an output that is not finite, or not the model's own; the latter once for each shape.

    A hook may do today what it did not do yesterday, so a model with hooks is compared every time.
    """
    if not torch.isfinite(record.output).all():
        bad = int((~torch.isfinite(record.output)).flatten(1).any(1).nonzero()[0])
        what = "The model's output" if sweep.plan.layer is None else f"The output of {sweep.plan.layer}"
        msg = (
            f"{what} for sample {bad} is not finite, so there is nothing to explain; check its weights "
            "and the input's scale."
        )
        raise RelpropError(msg)
    hidden = sweep.plan.layer is not None
    key = (None if hidden else sweep.forward.folded, autocast, *(x.shape for x in given))
    if key in known.verified and not known.hooks:
        return
    # A hidden layer's own output is not to be had, but what it leads to is.
    found = Sweep(Plan(known.graph, (None,) * len(known.graph), {})).forward(*_widened(given)) if hidden else record
    with _LOCK, undisturbed(module):  # what another thread takes back must not be what this one has seen
        torch.rand(1)  # so that a model that draws at random does not draw what it drew when it was traced
        expected = halves.answer(module, known.form, given)
    difference = float((found.output - expected).abs().max())
    agreement = COARSE if autocast else AGREEMENT.get(expected.dtype, 0.0)
    allowed = agreement * max(float(expected.abs().max()), 1e-6)
    if not difference <= allowed:
        also = f", or the hooks on {', '.join(known.hooks)}," if known.hooks else ""
        msg = (
            f"The traced graph of {type(module).__name__} computes something else than the model (outputs differ by "
            f"{difference:.2g}), so it is not explained; code that draws at random, branches on values or writes into "
            f"views{also} cannot be traced."
        )
        raise (_HooksMatter if known.hooks else RelpropError)(msg)
    known.verified.add(key)


def _check_finite(results: Sequence[Tensor], ledger: Ledger) -> None:
    if all(requests.finite(result) for result in results):
        return
    where = next((c for (c, _), (amount, _) in ledger.edges.items() if not torch.isfinite(amount).all()), 0)
    msg = (
        f"Relevance is no longer finite at {ledger.nodes[where]}: a split of your own gave shares that are not, or "
        "denominators cancel under the rule there; use float64, or a preset that conserves, such as 'paper'."
    )
    raise RelpropError(msg)
