"""A runner: explains and measures the images of a piece, and names what goes wrong.

It knows nothing of journals and of who else is at work: the local run and every worker of a cluster have one.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from relprop import requests
from relprop.datasets import Sample
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.metrics.remembering import Remembering
from relprop.metrics.scorer import Scorer, fastest
from relprop.study import pieces
from relprop.study.journal import Row, key
from relprop.study.loading import Loaded, load
from relprop.study.measure import Measure, Measured, Seen
from relprop.study.outcome import Outcome
from relprop.study.pieces import Batch, Piece
from relprop.study.troubles import Entry, Troubles, sentence
from relprop.weights import fingerprint

__all__ = ["Runner"]

Keys: TypeAlias = dict[tuple[Method, Measure], str]
"""The keys of an image's rows."""

_ONCE = {"start": "probability"}
"""What an option's default was before it became None, the preset's own: keys still tell it, so that old rows count."""

Found: TypeAlias = tuple[Measure, str, int, Measured]
"""What a measure says of an image: the measure, the image's name, the explained class and the numbers."""


class Runner:
    """Measures methods on batches of images.

    Args:
        model: What ``relprop.load`` returns.
        named: The methods.
        wanted: The measures.
        batch_size: Images explained at once.
        precision: Of scoring.

    Attributes:
        weights: A hash of the model's weights.
        groups: The methods, as pieces have them.
        failures: What went wrong since it was last asked.
        notes: What does not apply, likewise.
    """

    def __init__(
        self, model: Any, named: Sequence[Method], wanted: Sequence[Measure], batch_size: int, precision: str
    ) -> None:
        self.model = model
        self.named = named
        self.wanted = wanted
        self.batch_size = batch_size
        self.precision = precision
        self.weights = fingerprint(requests.module(model))
        self.failures, self.notes = Troubles(), Troubles()
        self.groups = pieces.groups(named, wanted, batch_size)
        self._scorer: Scorer | None = None
        self._regions: dict[str, str | None] = {}
        self._told = {method: [method.name, _told(method)] for method in named}
        self._pairs = [(method, measure) for method in named for measure in wanted if self._fits(method, measure)]

    def _fits(self, method: Method, measure: Measure) -> bool:
        why = measure.unfit(method)
        if why:
            self.notes.note(f"{measure.metric} of {method.name}", f"There are no rows: {why}.")
        return not why

    # -- What is to be done --

    def piece(self, batch: Batch, group: int) -> Piece:
        """The piece of a batch and a group of methods."""
        facts = {
            "images": [[sample.name, sample.label, sample.stamp] for sample in batch.samples],
            "weights": self.weights,
            "preparation": str(self.model.preparation),
            "precision": self.precision,
            "methods": [self._told[method] for method in self.groups[group]],
            "metrics": [[m.metric, m.protocol, dict(m.settings)] for m in self.wanted],
        }
        return Piece(batch, group, key(**facts))

    def keys(self, sample: Sample, company: Sequence[str] = ()) -> Keys:
        """The key of every row that an image is to have.

        Args:
            sample: The image.
            company: The content of its batch, for what depends on that.

        Raises:
            RelpropError: If the image cannot be read.
        """
        shared = {
            "image": sample.key,
            "label": sample.label,
            "weights": self.weights,
            "preparation": str(self.model.preparation),
            "precision": self.precision,
        }
        keys = {}
        for method, measure in self._pairs:
            more: dict[str, Any] = {"company": list(company)} if measure.company else {}
            if measure.objects:
                more["objects"] = self._region(sample)
                if more["objects"] is None:
                    self.notes.note(measure.metric, "There is no row: where the object is, is not known.", sample.name)
                    continue
            keys[method, measure] = key(
                **shared,
                **more,
                method=self._told[method],
                metric=[measure.metric, measure.protocol, dict(measure.settings)],
            )
        return keys

    def _region(self, sample: Sample) -> str | None:
        """A hash of where the objects are in what the model sees; None where that is nowhere, or not known."""
        if sample.name not in self._regions:
            found = None
            try:
                region = sample.objects(self.model.preparation)
                if region is not None and region.any():
                    found = hashlib.sha256(np.packbits(region.numpy()).tobytes()).hexdigest()[:16]
            except RelpropError as error:
                self.failures.note("", str(error), sample.name)
            self._regions[sample.name] = found
        return self._regions[sample.name]

    # -- Doing it --

    def work(self, piece: Piece, known: Container[str] = ()) -> Outcome:
        """All of a piece at once, for whoever is elsewhere."""
        begin = time.monotonic()
        loaded = load(self.model, piece.samples)
        keys = self.of(loaded, piece.group)
        rows = [row for _, some in self.measure(loaded, keys, known) for row in some]
        every = [k for some in keys.values() for k in some.values()]
        return Outcome(every, rows, *self.told(), time.monotonic() - begin)

    def told(self) -> tuple[list[Entry], list[Entry]]:
        """What went wrong and what does not apply since this was last asked."""
        told = self.failures.entries(), self.notes.entries()
        self.failures, self.notes = Troubles(), Troubles()
        return told

    def of(self, loaded: Loaded, group: int) -> dict[str, Keys]:
        """The keys of the rows that a group of methods is to have of some images, by their names."""
        company = [sample.key for sample in loaded.samples]
        self._regions.clear()
        keys = {sample.name: self.keys(sample, company) for sample in loaded.samples}
        mine = set(self.groups[group])
        return {name: {pair: k for pair, k in some.items() if pair[0] in mine} for name, some in keys.items()}

    def measure(
        self, loaded: Loaded, keys: Mapping[str, Keys], known: Container[str]
    ) -> Iterator[tuple[float, list[Row]]]:
        """Explains and scores images; yields which part of it is done, and the rows of one method at a time.

        A batch is explained as a whole, so that every image has the same company; of its maps, those are scored that
        lack a row.
        """
        self.failures.take(loaded.failures)
        samples = {sample.name: sample for sample in loaded.samples}
        lacking = {pair for name in samples for pair, k in keys[name].items() if k not in known}
        todo = {method: [m for m in self.wanted if (method, m) in lacking] for method in self.named}
        todo = {method: wanted for method, wanted in todo.items() if wanted}
        asked = {name: {p: k for p, k in keys[name].items() if p[1].company or k not in known} for name in samples}
        if not todo:
            return
        try:
            x = loaded.x.to(requests.device(requests.module(self.model)))
            scorer = self._score(x)
            target = scorer(x).argmax(1)
        except Exception as error:  # no reason for the next batch not to be tried
            for sample in samples:
                self.failures.note("", sentence(error), sample)
            return
        objects = [self._objects(sample, x.device) for sample in samples.values()]
        label = torch.tensor([-1 if s.label is None else s.label for s in samples.values()], device=x.device)
        tickets = [int(sample.key[:12], 16) for sample in samples.values()]
        for number, (method, wanted) in enumerate(todo.items(), 1):
            again = x.device.type == "cpu" and any(measure.shared for measure in wanted)
            score = Remembering(scorer) if again else scorer
            seen = Seen(self.model, method, list(samples), x, target, label, objects, tickets, score)
            rows = []
            for measure, name, chosen, (values, curves) in self._explain(seen, wanted, asked):
                about = (name, samples[name].label, chosen, method.name, measure.metric, measure.protocol)
                rows.append(Row(keys[name][method, measure], *about, values, curves))
            yield number / len(todo), rows

    def _explain(self, seen: Seen, wanted: Sequence[Measure], keys: Mapping[str, Keys]) -> Iterator[Found]:
        """What the measures say of a method on a batch.

        What fails for a batch is tried image by image, and what fails then is named; nothing else is lost.
        """
        for measure in wanted:
            if not measure.maps:
                yield from self._take(seen, measure, keys)
        wanted = [measure for measure in wanted if measure.maps]
        trouble = None
        try:
            seen = seen.explained() if wanted else seen
        except Exception as error:  # libraries stumble in ways of their own
            trouble = sentence(error)  # the error itself would hold memory, which the next try may need
        if trouble is None:
            for measure in wanted:
                yield from self._take(seen, measure, keys)
        elif len(seen.names) == 1:
            self.failures.note(seen.method.name, trouble, seen.names[0])
        else:
            for i in range(len(seen.names)):
                yield from self._explain(seen.only([i]), wanted, keys)

    def _take(self, seen: Seen, measure: Measure, keys: Mapping[str, Keys]) -> Iterator[Found]:
        """What one measure says; as :meth:`_explain`."""
        seen = seen.only([i for i, name in enumerate(seen.names) if (seen.method, measure) in keys[name]])
        trouble, found = None, list[Measured | str]()
        try:
            found = list(measure.run(seen)) if seen.names else []
        except Exception as error:  # as above
            trouble = sentence(error)
        if trouble is None:
            for name, target, one in zip(seen.names, seen.target.tolist(), found, strict=True):
                if isinstance(one, str):
                    self.notes.note(measure.metric, f"There is no row: {one}.", name)
                elif not all(map(math.isfinite, one[0].values())):
                    self.failures.note(f"{measure.metric} of {seen.method.name}", "It is not a finite number.", name)
                else:
                    yield measure, name, target, one
        elif len(seen.names) == 1 or measure.company:
            for name in seen.names:
                self.failures.note(f"{measure.metric} of {seen.method.name}", trouble, name)
        else:
            for i in range(len(seen.names)):
                yield from self._take(seen.only([i]), measure, keys)

    def _objects(self, sample: Sample, device: torch.device) -> Tensor | None:
        asked = any(measure.objects for measure in self.wanted) and self._region(sample)
        region = sample.objects(self.model.preparation) if asked else None
        return None if region is None else region.to(device)

    def warm(self) -> None:
        """Builds what is built once, before there is an image."""
        side = self.model.preparation.crop
        self._score(torch.zeros(1, 3, side, side, device=requests.device(requests.module(self.model))))

    def _score(self, x: Tensor) -> Scorer:
        """The way to the probabilities: the same in every process, whichever images come first."""
        if self._scorer is None:
            example = torch.randn(4, *x.shape[1:], generator=torch.Generator().manual_seed(0))
            self._scorer = fastest(self.model, example.to(x), self.precision, engine="steady")
        return self._scorer


def _told(method: Method) -> dict[str, str]:
    """The options that a row depends on."""
    return {k: str(_ONCE.get(k) if v is None else v) for k, v in method.options.items()}
