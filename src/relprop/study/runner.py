"""A runner: one pass over the images of a study, which computes what its journal lacks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from relprop import datasets, requests
from relprop.datasets import Batch, Sample
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.metrics.scorer import Scorer, fastest
from relprop.study.journal import Journal, Row, key
from relprop.study.measure import Measure, Measured, Seen
from relprop.study.progress import Progress, Tally
from relprop.study.troubles import Troubles, sentence
from relprop.weights import fingerprint

__all__ = ["Runner"]

Keys: TypeAlias = dict[tuple[Method, Measure], str]
"""The keys of an image's rows."""

Found: TypeAlias = tuple[Measure, str, int, Measured]
"""What a measure says of an image: the measure, the image's name, the explained class and the numbers."""


class Runner:
    """Measures methods on batches of images, and names what goes wrong.

    Args:
        model: What ``relprop.load`` returns.
        named: The methods.
        wanted: The measures.
        batch_size: Images explained at once.
        precision: Of scoring.

    Attributes:
        weights: A hash of the model's weights.
        mine: The keys of all rows that were asked for.
        failures: What went wrong.
        notes: What does not apply.
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
        self.mine: set[str] = set()
        self._scorer: Scorer | None = None
        self._unread: set[str] = set()
        self._regions: dict[str, str | None] = {}
        self._told = {method: [method.name, {k: str(v) for k, v in method.options.items()}] for method in named}
        self._pairs = [(method, measure) for method in named for measure in wanted if self._fits(method, measure)]

    def _fits(self, method: Method, measure: Measure) -> bool:
        why = measure.unfit(method)
        if why:
            self.notes.note(f"{measure.metric} of {method.name}", f"There are no rows: {why}.")
        return not why

    # -- What is to be done --

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

    def _keys(self, batch: Sequence[Sample]) -> dict[str, Keys]:
        """The keys of a batch, by the images' names; an image that cannot be read is named and has none."""
        readable = []
        for sample in batch:
            try:
                _ = sample.key
                readable.append(sample)
            except RelpropError as error:  # noqa: PERF203 - a round is a file
                self._fail(sample, error)
        company = [sample.key for sample in readable]
        return {sample.name: self.keys(sample, company) for sample in readable}

    def _fail(self, sample: Sample, error: Exception) -> None:
        self._unread.add(sample.name)
        self.failures.note("", sentence(error), sample.name)

    # -- Doing it --

    def __call__(
        self, batches: Sequence[Sequence[Sample]], journal: Journal, progress: Callable[[Progress], None] | None
    ) -> None:
        done, lacking = journal.keys(), []
        for batch in batches:
            keys = {k for some in self._keys(batch).values() for k in some.values()}
            self.mine |= keys
            # A batch in which a row is lacking is taken whole, so that it is computed in the same company.
            lacking += [] if keys <= done else [batch]
        total, left = (sum(map(len, some)) for some in (batches, lacking))
        tally = Tally(total, total - left, self.wanted)
        if progress is not None:
            tally.add(row for row in journal.brief() if row.key in self.mine)
            progress(tally.progress(0))
        self._samples = {sample.path: sample for batch in lacking for sample in batch}
        count = 0
        for loaded in datasets.batches(chain(*lacking), self._prepare, self.batch_size):
            for part, rows in self._measure(loaded, done):
                journal.add(rows)
                tally.add(rows)
                if progress is not None and part < 1:
                    progress(tally.progress(count + part * len(loaded.samples)))
            count += len(loaded.samples)
            if progress is not None:
                progress(tally.progress(count))

    def _prepare(self, path: Path) -> Tensor:
        try:
            x: Tensor = self.model.prepare(path)
        except Exception as error:  # a file may be broken in ways that nobody has thought of
            self._fail(self._samples[path], error)
            side = self.model.preparation.crop
            return torch.zeros(3, side, side)
        return x

    def _measure(self, batch: Batch, done: set[str]) -> Iterator[tuple[float, list[Row]]]:
        """Explains and scores a batch; yields which part of it is done, and the rows of one method at a time."""
        keys = self._keys(batch.samples)
        good = [i for i, sample in enumerate(batch.samples) if sample.name not in self._unread]
        samples = {batch.samples[i].name: batch.samples[i] for i in good}
        lacking = {pair for name in samples for pair, k in keys[name].items() if k not in done}
        todo = {method: [m for m in self.wanted if (method, m) in lacking] for method in self.named}
        todo = {method: wanted for method, wanted in todo.items() if wanted}
        if not todo:
            return
        try:
            scorer = self._score(batch.x[good])
            target = scorer(batch.x[good]).argmax(1)
        except Exception as error:  # no reason for the next batch not to be tried
            for sample in samples.values():
                self._fail(sample, error)
            return
        objects = [self._objects(sample) for sample in samples.values()]
        tickets = [int(sample.key[:12], 16) for sample in samples.values()]
        for number, (method, wanted) in enumerate(todo.items(), 1):
            facts = (list(samples), batch.x[good], target, batch.labels[good], objects, tickets, scorer)
            seen = Seen(self.model, method, *facts)
            rows = []
            for measure, name, chosen, (values, curves) in self._explain(seen, wanted, keys):
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

    def _objects(self, sample: Sample) -> Tensor | None:
        asked = any(measure.objects for measure in self.wanted) and self._region(sample)
        return sample.objects(self.model.preparation) if asked else None

    def _score(self, x: Tensor) -> Scorer:
        """The fastest way to the probabilities, found out once."""
        if self._scorer is None:
            self._scorer = fastest(self.model, x, self.precision)
        return self._scorer
