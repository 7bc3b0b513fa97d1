"""Answers: what a model sees in a photo, with the map at every block on the way and, if asked for, a contrast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

import relprop
from relprop.figure import Share, shares
from relprop.plans import Plan
from relprop.result import Explanation
from relprop.runs import named, row_of
from relprop.zoo import Model

__all__ = ["Answer", "Question", "Stop", "answer"]


@dataclass(frozen=True)
class Question:
    """What is asked of a model about a photo.

    Attributes:
        target: The class to explain, by its number, name or synset; None for the predicted one.
        contrast: The class that the target is held against; None for none.
        preset: Which rules to use.
        split: How sums part relevance; None for the preset's way.
        identity_skips: Whether those have a share.
        start: What the target starts with; None for what the preset says.
    """

    target: int | str | None = None
    contrast: int | str | None = None
    preset: str = "relprop"
    split: str | None = None
    identity_skips: bool = True
    start: str | None = None

    @property
    def how(self) -> dict[str, Any]:
        """What makes a plan."""
        return {"preset": self.preset, "split": self.split, "identity_skips": self.identity_skips}


@dataclass(frozen=True)
class Stop:
    """A place on the way back: what it is called, and the relevance there, ``(H, W)``."""

    name: str
    map: Tensor = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What came out.

    Attributes:
        name: What the photo is called.
        photo: What the model saw of it.
        explanation: Of one sample; its settings say how it was made.
        plan: What it was made by; None where that is not known any more.
        shares: How relevance was parted at every merge.
        stops: The maps on the way, from the output to the pixels, which are last.
        row: What there is to say, in JSON types.
        contrast: The class that the target was held against, and the difference of the two maps.
        classes: What all classes are called.
    """

    name: str
    photo: Image | None
    explanation: Explanation
    plan: Plan | None
    shares: tuple[Share, ...]
    stops: tuple[Stop, ...]
    row: Mapping[str, Any]
    contrast: tuple[Mapping[str, Any], Tensor] | None = None
    classes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        """The explained class, with its probability."""
        return f"{named(self.row['target'])}, {100 * self.row['target']['probability']:.0f} %"


def answer(model: Model, picture: Image, name: str, question: Question) -> Answer:
    """Asks a model.

    Raises:
        RelpropError: The question cannot be answered.
    """
    x = model.prepare(picture)[None]
    plan = relprop.plan(model, x, **question.how)
    layers = _layers(plan, model)
    target, against = (None if c is None else model.find_class(c) for c in (question.target, question.contrast))
    whole = relprop.explain(model, x, target, **question.how, start=question.start, layers=layers)
    about = {
        "model": model.name,
        "weights": _public(model),
        **question.how,
        "start": whole.settings["start"],
        "image": name,
    }
    kept = {module: whole.relevance_at(module)[0] for module in reversed(layers)}
    stops = [Stop(f"the input of {module}", r.sum(0)) for module, r in kept.items() if r.ndim == 3 and r[0].numel() > 1]
    e = replace(whole, layers={}, settings={**about, **whole.settings})
    row = row_of(Path(name), model, e)
    e = replace(e, settings={**e.settings, "class": row["target"]})
    parted = shares(e.ledger, plan.graph)
    return Answer(
        name,
        model.crop(picture),
        e,
        plan,
        tuple(parted),
        (*stops, Stop("the pixels", e.heatmap[0])),
        row,
        None if against is None else _contrast(model, x, [int(e.target[0]), against], question),
        model.classes or tuple(f"class {index}" for index in range(model.outputs)),
    )


def _layers(plan: Plan, model: Model) -> list[str]:
    """The modules at whose inputs a map is kept: those that are residual blocks, and those after the last of them."""
    graph = plan.graph
    blocks = [node.name.rpartition(".")[0] for node in graph if node.merge is not None]
    last = max((i for i, node in enumerate(graph) if node.merge is not None), default=0)
    calls = {name: min(nodes) for (name, call), nodes in graph.calls.items() if call == 0}
    after = [name for name, _ in model.module.named_children() if calls.get(name, -1) > last]
    return list(dict.fromkeys(name for name in [*blocks, *after] if name in calls))


def _contrast(model: Model, x: Tensor, pair: list[int], question: Question) -> tuple[dict[str, Any], Tensor]:
    """Why this and not that: both start with one, for else the likelier class would drown the other."""
    both = relprop.explain(model, x, torch.tensor([pair]), **question.how, start="one")
    name = model.classes[pair[1]] if model.classes else None
    about = {"class": pair[1], "name": name, "probability": float(both.output[0].double().softmax(0)[pair[1]])}
    this, that = both.heatmap[0]
    return about, this - that


def _public(model: Model) -> dict[str, Any]:
    """Where the weights are from, without a server's paths."""
    source = model.source
    origin = Path(source.origin).name if Path(source.origin).is_absolute() else source.origin
    return {**source.__dict__, "origin": origin}
