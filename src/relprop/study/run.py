"""Running a study: methods x images x metrics, one row each, resumable at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relprop import datasets, methods, requests
from relprop.datasets import Dataset, Sample
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.metrics.scorer import Scorer, fastest
from relprop.study import measures
from relprop.study.journal import Journal, Row, key
from relprop.study.measures import Measure, Seen
from relprop.study.table import Table, tabulate

Progress = Callable[[int, int], None]
"""Told how many images are done, and of how many."""

PACKAGES = ("relprop", "torch", "torchvision", "captum", "zennit", "grad-cam", "numpy", "pillow")


@dataclass(frozen=True, eq=False)
class Study:
    """What was measured.

    Attributes:
        rows: One for each image, method, metric and protocol.
        failures: What could not be done, by image or method, in a sentence each.
        manifest: What it was run with.
    """

    rows: tuple[Row, ...] = field(repr=False)
    failures: Mapping[str, str]
    manifest: Mapping[str, Any] = field(repr=False)

    def table(self, reference: str | None = None, columns: Sequence[str] | None = None) -> Table:
        """Means with intervals, and paired differences to a reference method; see :func:`relprop.study.tabulate`."""
        return tabulate(self.rows, reference, columns)


def evaluate(
    model: Any,
    data: Dataset | str | os.PathLike[str],
    methods: Sequence[str | Method] = ("paper",),  # noqa: A002, RUF100 - the contract's name
    metrics: Sequence[str] = ("insertion-deletion",),
    *,
    protocol: str = "tie-safe",
    limit: int | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 8,
    precision: str = "float32",
    progress: Progress | None = None,
    **options: Any,
) -> Study:
    """Measures methods on images; what an earlier run has measured is not measured again.

    Every method explains the predicted class. Under the published protocol the true class is scored, as there.

    Args:
        model: What ``relprop.load`` returns.
        data: A dataset, or the path of one.
        methods: Names of methods, see ``relprop.methods``, or methods of your own.
        metrics: Names of metrics.
        protocol: For insertion and deletion: ``tie-safe``, ``otsuki2024`` or ``both``.
        limit: At most so many images, spread over the classes.
        seed: Which ones.
        out: Folder of the study: its journal, ``rows.parquet`` and ``manifest.json``; None for none.
        batch_size: Images explained at once.
        precision: Of scoring; ``bf16`` trades 1e-2 of a probability for speed.
        progress: Told of each batch.
        **options: Of insertion and deletion: ``points``; under the tie-safe protocol also ``baseline`` and ``seeds``.

    Returns:
        The study.

    Raises:
        RelpropError: If the request cannot be met; an image or a method that fails is named in ``failures`` instead.
    """
    if not hasattr(model, "prepare") or not hasattr(model, "preparation"):
        msg = "A study needs to know how the model wants its images; pass what relprop.load returns."
        raise RelpropError(msg)
    requests.module(model)
    chosen = data if isinstance(data, Dataset) else datasets.open(data)
    chosen = chosen if limit is None else chosen.limit(limit, seed)
    named = [m if isinstance(m, Method) else get_method(m) for m in methods]
    wanted = measures.make(metrics, protocol, options)
    folder = None if out is None else Path(out)
    run = _Run(model, named, wanted, batch_size, precision)
    manifest = _manifest(run, chosen, {"limit": limit, "seed": seed, "protocol": protocol, **options})
    with Journal(Path(":memory:") if folder is None else folder / "journal.sqlite") as journal:
        _write(folder, manifest)
        run(chosen, journal, progress)
        mine = {k for s in chosen if s.name not in run.failures for k in run.keys(s).values()}
        rows = tuple(row for row in journal if row.key in mine)
        manifest |= {"rows": len(rows), "failures": run.failures, "finished": _now()}
        _write(folder, manifest)
        if folder is not None:
            journal.export(folder / "rows.parquet")
    return Study(rows, run.failures, manifest)


get_method = methods.get
"""The registry's, under a name that the argument of :func:`evaluate` does not hide."""


class _Run:
    """One pass over the images; computes what the journal lacks."""

    def __init__(
        self, model: Any, named: Sequence[Method], wanted: Sequence[Measure], batch_size: int, precision: str
    ) -> None:
        self.model = model
        self.named = named
        self.wanted = wanted
        self.batch_size = batch_size
        self.precision = precision
        self.weights = _fingerprint(requests.module(model))
        self.failures: dict[str, str] = {}
        self._scorer: Scorer | None = None

    def keys(self, sample: Sample) -> dict[tuple[Method, Measure], str]:
        """The key of every row that an image is to have."""
        shared = {
            "image": sample.key,
            "label": sample.label,
            "weights": self.weights,
            "preparation": str(self.model.preparation),
            "precision": self.precision,
        }
        return {
            (method, measure): key(
                **shared,
                method=[method.name, {k: str(v) for k, v in method.options.items()}],
                metric=[measure.metric, measure.protocol, dict(measure.settings)],
            )
            for method in self.named
            for measure in self.wanted
        }

    def __call__(self, data: Dataset, journal: Journal, progress: Progress | None) -> None:
        done = journal.keys()
        total = len(data)
        count = 0
        for batch in datasets.batches(self._pending(data, done), self._prepare, self.batch_size):
            good = [i for i, s in enumerate(batch.samples) if s.name not in self.failures]
            if good:
                samples = [batch.samples[i] for i in good]
                for rows in self._measure(batch.x[good], batch.labels[good], samples, done):
                    journal.add(rows)
            count += len(batch.samples)
            if progress is not None:
                progress(total - self._left + count, total)

    def _pending(self, data: Dataset, done: set[str]) -> Iterator[Sample]:
        """The batches in which a row is lacking, whole, so that a resumed study computes in the same company.

        An image that cannot be read is named and left out.
        """
        readable = []
        for sample in data:
            try:
                self.keys(sample)
                readable.append(sample)
            except RelpropError as error:  # noqa: PERF203 - a round is a file
                self.failures[sample.name] = str(error)
        size = self.batch_size
        batches = [readable[i : i + size] for i in range(0, len(readable), size)]
        lacking = [s for b in batches for s in b if any(not done.issuperset(self.keys(t).values()) for t in b)]
        self._left = len(lacking)
        self._names = {s.path: s.name for s in lacking}
        return iter(lacking)

    def _prepare(self, path: Path) -> Tensor:
        try:
            x: Tensor = self.model.prepare(path)
        except RelpropError as error:
            self.failures[self._names[path]] = str(error)
            side = self.model.preparation.crop
            return torch.zeros(3, side, side)
        return x

    def _measure(self, x: Tensor, label: Tensor, samples: Sequence[Sample], done: set[str]) -> Iterator[list[Row]]:
        """Explains and scores a batch; yields the rows of one method at a time."""
        scorer = self._score(x)
        target = scorer(x).argmax(1)
        objects = [s.objects(self.model.preparation) for s in samples] if any(m.objects for m in self.wanted) else []
        tickets = [int(s.key[:12], 16) for s in samples]
        keys = [self.keys(s) for s in samples]
        for method in self.named:
            lacking = [m for m in self.wanted if any(k[method, m] not in done for k in keys)]
            if not lacking:
                continue
            try:
                fast = {"scorer": scorer} if "scorer" in method.options else {}  # for those that mask and score
                maps = method(self.model, x, target, **fast)
            except RelpropError as error:
                self.failures[method.name] = str(error)
                continue
            rows = []
            for measure in lacking:
                where = [i for i in range(len(samples)) if not (measure.objects and objects[i] is None)]
                if not where:
                    continue
                masks = [m for m in (objects[i] for i in where) if m is not None] if measure.objects else []
                regions = torch.stack(masks) if masks else None
                some = [tickets[i] for i in where]
                seen = Seen(self.model, x[where], target[where], label[where], regions, some, scorer)
                # As published, gradient baselines are ranked by their first channel; all other maps by the sum.
                whole = measure.first_channel and method.family == "captum"
                given = maps[where] if whole else maps[where].sum(1, keepdim=True)
                for i, (values, curves) in zip(where, measure.run(seen, given), strict=True):
                    facts = (samples[i].name, samples[i].label, int(target[i]), method.name)
                    rows.append(Row(keys[i][method, measure], *facts, measure.metric, measure.protocol, values, curves))
            yield rows

    def _score(self, x: Tensor) -> Scorer:
        """The fastest way to the probabilities, found out once."""
        if self._scorer is None:
            self._scorer = fastest(self.model, x, self.precision)
        return self._scorer


def _fingerprint(module: torch.nn.Module) -> str:
    """A hash of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _manifest(run: _Run, data: Dataset, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is needed to run it again."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:  # noqa: PERF203 - an extra that is not there
            continue
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": _now(),
        "model": run.model.name,
        "source": str(run.model.source),
        "weights": run.weights,
        "data": data.name,
        "layout": data.layout,
        "images": len(data),
        "methods": [m.name for m in run.named],
        "metrics": [f"{m.metric} {m.protocol}".strip() for m in run.wanted],
        "settings": {k: str(v) for k, v in settings.items()},
        "precision": run.precision,
        "batch size": run.batch_size,
        "python": platform.python_version(),
        "packages": packages,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write(folder: Path | None, manifest: Mapping[str, Any]) -> None:
    if folder is None:
        return
    partial = folder / "manifest.partial"
    partial.write_text(json.dumps(manifest, indent=2, default=str) + "\n")
    partial.replace(folder / "manifest.json")
