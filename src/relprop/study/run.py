"""Running a study: methods x images x metrics, one row each, resumable at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relprop.datasets import Dataset, Stream
from relprop.methods import Method
from relprop.study import manifest
from relprop.study.journal import PRODUCT, Row
from relprop.study.local import Local
from relprop.study.log import Log
from relprop.study.output import Output
from relprop.study.parts import Parts
from relprop.study.pieces import Batch, Shard
from relprop.study.progress import Progress
from relprop.study.request import Request
from relprop.study.runner import Runner
from relprop.study.table import Table, tabulate

__all__ = ["Engine", "Shard", "Study", "evaluate"]


class Engine(Protocol):
    """What works on the pieces of a study: this process, or a cluster."""

    def __call__(self, run: Runner, batches: Iterable[Batch], log: Log) -> None:
        """Does what the log lacks."""

    def about(self) -> dict[str, Any]:
        """What a manifest should tell of it."""


@dataclass(frozen=True, eq=False)
class Study:
    """What was measured.

    Attributes:
        rows: One for each image, method, metric and protocol.
        failures: What went wrong, by method and image, in a sentence each.
        notes: What does not apply, likewise: a metric of objects and an image without any, say.
        manifest: What it was run with.
    """

    rows: tuple[Row, ...] = field(repr=False)
    failures: Mapping[str, str]
    notes: Mapping[str, str]
    manifest: Mapping[str, Any] = field(repr=False)

    def table(self, reference: str | None = None, columns: Sequence[str] | None = None, **choice: Any) -> Table:
        """Means with intervals, and paired differences to a reference method; see :func:`relprop.study.tabulate`."""
        return tabulate(self.rows, reference, columns, **choice)


def evaluate(
    model: Any,
    data: Dataset | Stream | str | os.PathLike[str],
    methods: Sequence[str | Method] = ("relprop",),  # noqa: A002, RUF100 - the contract's name
    metrics: Sequence[str] = ("insertion-deletion",),
    *,
    protocol: str = "tie-safe",
    limit: int | None = None,
    seed: int = 0,
    shard: Shard | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 8,
    precision: str = "float32",
    progress: Callable[[Progress], None] | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Study:
    """Measures methods on images; what an earlier run has measured is not measured again.

    Every method explains the predicted class. Under the published protocol the true class is scored, as there. What
    goes wrong with one method or image is named in ``failures``, and all others go on.

    Args:
        model: What ``relprop.load`` returns.
        data: A dataset, or the path of one; a listing of images or WebDataset shards, by path or URL, are streamed.
        methods: Names of methods, see ``relprop.methods``, or methods of your own.
        metrics: Names of metrics, as ``relprop metrics`` lists them.
        protocol: For insertion and deletion: ``tie-safe``, ``otsuki2024``, ``both``, or ``together``, which is both in
            the same places of the curves: on a CPU, masks that they share are scored once.
        limit: At most so many images, spread over the classes.
        seed: Which ones.
        shard: ``(3, 16)`` for the third of sixteen parts, each with every sixteenth batch of the whole; together, see
            :func:`relprop.study.merge`, they have its rows.
        out: Folder of the study: its journal, ``rows.parquet`` and ``manifest.json``; or a URL that fsspec knows, to
            which rows go in parts while the study goes on; None for none.
        batch_size: Images explained at once.
        precision: Of scoring; ``bf16`` trades up to 3e-2 of a probability for speed.
        progress: Told after each method of each batch.
        engine: What works on the pieces; by default this process, else a :class:`relprop.cluster.Cluster`. Rows do not
            depend on it.
        **options: Of insertion and deletion: ``points``; under the tie-safe protocol also ``baseline`` and ``seeds``.

    Returns:
        The study.

    Raises:
        RelpropError: If the request cannot be met.
        KeyboardInterrupt: If it is interrupted; what was measured is in ``out``, and the same call continues.
    """
    asked = Request.of(model, data, methods, metrics, protocol, limit, seed, shard, batch_size, precision, options)
    run, named, wanted, chosen = asked.run, asked.run.named, asked.run.wanted, asked.data
    place = Output.at(out)
    facts: dict[str, Any] = {
        "command": manifest.command(),
        "started": manifest.now(),
        "model": model.name,
        "source": str(model.source),
        "weights": run.weights,
        "data": chosen.name,
        "layout": chosen.layout,
        "images": asked.images,
        "methods": [m.name for m in named],
        "metrics": [f"{m.metric} {m.protocol}".strip() for m in wanted],
        "settings": {k: str(v) for k, v in {"limit": limit, "seed": seed, "protocol": protocol, **options}.items()},
        "metric settings": {f"{m.metric} {m.protocol}".strip(): dict(m.settings) for m in wanted},
        **({"shard": "/".join(map(str, shard))} if shard else {}),
        "precision": precision,
        "batch size": batch_size,
        **manifest.surroundings(),
    }
    with place.journal() as journal:
        parts = Parts(place.url, journal) if place.url else None
        facts = manifest.begin(place.folder, facts)
        manifest.write(place.folder, facts)
        log = Log(run, journal, parts, facts["images"], progress)
        try:
            (engine or Local())(run, asked.batches(), log)
            log.close()
        except BaseException:  # Ctrl-C, say; what was measured is in the journal, a method of a batch at a time
            manifest.write(place.folder, {**facts, "stopped": manifest.now()})
            raise
        rows = journal.claimed()
        if place.folder is not None and place.url is None and (why := journal.export(place.folder / PRODUCT)):
            log.notes.note(PRODUCT, why)
        failures, notes = log.failures.sentences(), log.notes.sentences()
        facts |= {"rows": len(rows), "failures": failures, "notes": notes, "finished": manifest.now()}
        facts |= {} if engine is None else {"engine": engine.about()}
        manifest.write(place.folder, facts)
        if parts is not None:
            parts.put(manifest.FILE, json.dumps(facts, indent=2, default=str) + "\n")
    return Study(rows, failures, notes, facts)
