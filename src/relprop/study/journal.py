"""The journal: a study's rows as they come in, safe from crashes.

One row for each image, method, metric and protocol, under a key that says what it was computed from: the content of the
image and of the weights, and the settings of the method and the metric. What is there need not be computed again; two
journals with the same keys hold the same rows. SQLite's write-ahead log makes each batch of rows all or nothing,
whatever kills the process.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relprop.errors import RelpropError

FORMAT = "1"
"""Part of every key: rows of another format are not mistaken for these."""


PRODUCT = "rows.parquet"
"""What a study leaves for others, beside its journal."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        key: What it was computed from, see :func:`key`.
        image: Name of the image.
        label: Its class, or None.
        target: The class that was explained.
        method: Name of the method.
        metric: Name of the metric.
        protocol: How it was measured, where there is more than one way.
        values: The numbers, by name.
        curves: Longer lists of numbers, by name.
    """

    key: str
    image: str
    label: int | None
    target: int
    method: str
    metric: str
    protocol: str
    values: Mapping[str, float]
    curves: Mapping[str, list[float]] = field(default_factory=dict)


def key(**facts: Any) -> str:
    """A name for everything that a row depends on."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """Rows on disk.

    Args:
        path: The file; made if it is not there.

    Raises:
        RelpropError: If it cannot be opened, or is no journal.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=30)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, image TEXT, label INTEGER, target INTEGER,"
                " method TEXT, metric TEXT, protocol TEXT, numbers TEXT, curves TEXT) WITHOUT ROWID"
            )
            self._file.commit()
        except (OSError, sqlite3.Error) as error:
            msg = f"The journal {path} cannot be opened: {error}."
            raise RelpropError(msg) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return int(self._file.execute("SELECT count(*) FROM rows").fetchone()[0])

    def keys(self) -> set[str]:
        """The keys of all rows."""
        return {k for (k,) in self._file.execute("SELECT key FROM rows")}

    def add(self, rows: Iterable[Row]) -> int:
        """Writes rows, all or none; a key that is there already keeps its row.

        Returns:
            How many were new.

        Raises:
            RelpropError: If they cannot be written.
        """
        before = self._file.total_changes
        try:
            with self._file:
                self._file.executemany(
                    "INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            *(r.key, r.image, r.label, r.target, r.method, r.metric, r.protocol),
                            json.dumps(dict(r.values)),
                            json.dumps(dict(r.curves)),
                        )
                        for r in rows
                    ],
                )
        except sqlite3.Error as error:
            raise RelpropError(f"Rows cannot be written: {error}; once they can, the same call continues.") from error
        return self._file.total_changes - before

    def __iter__(self) -> Iterator[Row]:
        """All rows, in an order that does not depend on when they came in."""
        query = "SELECT * FROM rows ORDER BY metric, protocol, method, image, key"
        for name, image, label, target, method, metric, protocol, numbers, curves in self._file.execute(query):
            facts = (name, image, label, target, method, metric, protocol)
            yield Row(*facts, values=json.loads(numbers), curves=json.loads(curves))

    def brief(self) -> Iterator[Row]:
        """All rows without their curves, in any order: a fraction of what they hold."""
        query = "SELECT key, image, label, target, method, metric, protocol, numbers FROM rows"
        for name, image, label, target, method, metric, protocol, numbers in self._file.execute(query):
            yield Row(name, image, label, target, method, metric, protocol, json.loads(numbers))

    def export(self, path: Path) -> str | None:
        """Writes all rows as one Parquet file, one column a number.

        Returns:
            Why it could not be done, or None: the rows are here in any case.
        """
        try:
            pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        except ImportError:
            return "Parquet files need pyarrow; install it with pip install 'relprop[study]'."
        rows = [
            {k: getattr(r, k) for k in ("key", "image", "label", "target", "method", "metric", "protocol")}
            | dict(r.values)
            | {f"{name} curve": values for name, values in r.curves.items()}
            for r in self
        ]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = pa.Table.from_pylist([{c: row.get(c) for c in columns} for row in rows])
        partial = path.with_suffix(".partial")
        pq.write_table(table, partial)
        partial.replace(path)
        return None


def read(folder: Path) -> list[Row]:
    """The rows of a study: from its journal, or where that is gone, from its product, ``rows.parquet``.

    Raises:
        RelpropError: If the folder holds neither.
    """
    path = folder / "journal.sqlite"
    if path.exists():
        with Journal(path) as journal:
            return list(journal)
    product = folder / PRODUCT
    if not product.exists():
        raise RelpropError(f"{folder} holds no study; relprop evaluate ... --out {folder} makes one.")
    try:
        found = importlib.import_module("pyarrow.parquet").read_table(product).to_pylist()
    except ImportError:
        raise RelpropError(f"{product} needs pyarrow; install it with pip install 'relprop[study]'.") from None
    rows = []
    for each in found:
        facts = {name: each.pop(name) for name in ("key", "image", "label", "target", "method", "metric", "protocol")}
        curves = {k.removesuffix(" curve"): v for k, v in each.items() if k.endswith(" curve") and v is not None}
        numbers = {k: v for k, v in each.items() if not k.endswith(" curve") and v is not None}
        rows.append(Row(**facts, values=numbers, curves=curves))
    return rows
