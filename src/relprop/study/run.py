"""Running a study: methods x images x metrics, one row each, resumable at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from relprop import datasets, methods, requests
from relprop.datasets import Dataset, Sample
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.study import manifest, measures
from relprop.study.journal import PRODUCT, Journal, Row, read
from relprop.study.progress import Progress
from relprop.study.runner import Runner
from relprop.study.table import Table, tabulate

__all__ = ["Shard", "Study", "evaluate"]

Shard: TypeAlias = tuple[int, int]
"""Which part of a study, from 1 on, and of how many."""


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
    data: Dataset | str | os.PathLike[str],
    methods: Sequence[str | Method] = ("paper",),  # noqa: A002, RUF100 - the contract's name
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
    **options: Any,
) -> Study:
    """Measures methods on images; what an earlier run has measured is not measured again.

    Every method explains the predicted class. Under the published protocol the true class is scored, as there. What
    goes wrong with one method or image is named in ``failures``, and all others go on.

    Args:
        model: What ``relprop.load`` returns.
        data: A dataset, or the path of one.
        methods: Names of methods, see ``relprop.methods``, or methods of your own.
        metrics: Names of metrics, as ``relprop metrics`` lists them.
        protocol: For insertion and deletion: ``tie-safe``, ``otsuki2024`` or ``both``.
        limit: At most so many images, spread over the classes.
        seed: Which ones.
        shard: ``(3, 16)`` for the third of sixteen parts, each with every sixteenth batch of the whole; together, see
            :func:`relprop.study.merge`, they have its rows.
        out: Folder of the study: its journal, ``rows.parquet`` and ``manifest.json``; None for none.
        batch_size: Images explained at once.
        precision: Of scoring; ``bf16`` trades 1e-2 of a probability for speed.
        progress: Told after each method of each batch.
        **options: Of insertion and deletion: ``points``; under the tie-safe protocol also ``baseline`` and ``seeds``.

    Returns:
        The study.

    Raises:
        RelpropError: If the request cannot be met.
        KeyboardInterrupt: If it is interrupted; what was measured is in ``out``, and the same call continues.
    """
    if not hasattr(model, "prepare") or not hasattr(model, "preparation"):
        msg = "A study needs to know how the model wants its images; pass what relprop.load returns."
        raise RelpropError(msg)
    requests.module(model)
    chosen = data if isinstance(data, Dataset) else datasets.open(data)
    chosen = chosen if limit is None else chosen.limit(limit, seed)
    named = [m if isinstance(m, Method) else get_method(m) for m in dict.fromkeys(methods)]
    wanted = measures.make(metrics, protocol, options)
    batches = _batches(chosen, batch_size, shard)
    folder = None if out is None else Path(out)
    run = Runner(model, named, wanted, batch_size, precision)
    facts: dict[str, Any] = {
        "command": manifest.command(),
        "started": manifest.now(),
        "model": model.name,
        "source": str(model.source),
        "weights": run.weights,
        "data": chosen.name,
        "layout": chosen.layout,
        "images": sum(map(len, batches)),
        "methods": [m.name for m in named],
        "metrics": [f"{m.metric} {m.protocol}".strip() for m in wanted],
        "settings": {k: str(v) for k, v in {"limit": limit, "seed": seed, "protocol": protocol, **options}.items()},
        "metric settings": {f"{m.metric} {m.protocol}".strip(): dict(m.settings) for m in wanted},
        **({"shard": "/".join(map(str, shard))} if shard else {}),
        "precision": precision,
        "batch size": batch_size,
        **manifest.surroundings(),
    }
    # Where the journal is gone and its product is there, as in a folder of results, that is continued.
    path = Path(":memory:") if folder is None else folder / "journal.sqlite"
    kept = read(folder) if folder is not None and (folder / PRODUCT).exists() and not path.exists() else []
    with Journal(path) as journal:
        if kept:
            journal.add(kept)
        facts = manifest.begin(folder, facts)
        manifest.write(folder, facts)
        try:
            run(batches, journal, progress)
        except BaseException:  # Ctrl-C, say; what was measured is in the journal, a method of a batch at a time
            manifest.write(folder, {**facts, "stopped": manifest.now()})
            raise
        rows = tuple(row for row in journal if row.key in run.mine)
        if folder is not None and (why := journal.export(folder / PRODUCT)):
            run.notes.note(PRODUCT, why)
        failures, notes = run.failures.sentences(), run.notes.sentences()
        facts |= {"rows": len(rows), "failures": failures, "notes": notes, "finished": manifest.now()}
        manifest.write(folder, facts)
    return Study(rows, failures, notes, facts)


get_method = methods.get
"""The registry's, under a name that the argument of :func:`evaluate` does not hide."""


def _batches(data: Dataset, size: int, shard: Shard | None) -> list[tuple[Sample, ...]]:
    """The batches of a study, or of a part of it: the same ones whoever computes them, and whenever."""
    if size < 1:
        raise RelpropError(f"The batch size is {size!r}; a batch has one image at least.")
    which, parts = shard or (1, 1)
    if not 1 <= which <= parts:
        raise RelpropError(f"There is no shard {which} of {parts}; those of sixteen are 1/16 to 16/16.")
    return [data.samples[i : i + size] for i in range(0, len(data), size)][which - 1 :: parts]
