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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any

from relprop.errors import RelpropError
from relprop.study.troubles import Entry

FORMAT = "1"
"""Part of every key: rows of another format are not mistaken for these."""


JOURNAL = "journal.sqlite"
PRODUCT = "rows.parquet"
"""The file of a study's rows, and what it leaves for others beside that."""

MANY = 200_000
"""Rows that a study hands out with their curves; those of more would fill the memory."""

_GROUP = 10_000
_NAMES = ("key", "image", "label", "target", "method", "metric", "protocol")
_FACTS, _NONE = ", ".join(_NAMES), "'{}'"
_CURVE = " curve"
_ORDER = "metric, protocol, method, image, key"


@dataclass(frozen=True, slots=True)
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

    Attributes:
        file: The open database.

    Args:
        path: The file; made if it is not there.

    Raises:
        RelpropError: If it cannot be opened, or is no journal.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = sqlite3.connect(path, timeout=30)
            self.file.execute("PRAGMA journal_mode=WAL")
            self.file.execute(
                "CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, image TEXT, label INTEGER, target INTEGER,"
                " method TEXT, metric TEXT, protocol TEXT, numbers TEXT, curves TEXT) WITHOUT ROWID"
            )
            self.file.execute(
                "CREATE TABLE IF NOT EXISTS pieces (id TEXT PRIMARY KEY, keys TEXT, notes TEXT, part INTEGER)"
                " WITHOUT ROWID"
            )
            self.file.execute("CREATE TEMP TABLE mine (key TEXT PRIMARY KEY) WITHOUT ROWID")
            self.file.commit()
        except (OSError, sqlite3.Error) as error:
            msg = f"The journal {path} cannot be opened: {error}."
            raise RelpropError(msg) from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __len__(self) -> int:
        return int(self.file.execute("SELECT count(*) FROM rows").fetchone()[0])

    def keys(self) -> Iterator[str]:
        """The keys of all rows."""
        return (k for (k,) in self.file.execute("SELECT key FROM rows"))

    def add(self, rows: Iterable[Row]) -> int:
        """Writes rows, all or none; a key that is there already keeps its row.

        Returns:
            How many were new.

        Raises:
            RelpropError: If they cannot be written.
        """
        before = self.file.total_changes
        try:
            with self.file:
                self.file.executemany(
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
        return self.file.total_changes - before

    def __iter__(self) -> Iterator[Row]:
        """All rows, in an order that does not depend on when they came in."""
        return map(_row, self.file.execute(f"SELECT * FROM rows ORDER BY {_ORDER}"))

    def brief(self) -> Iterator[Row]:
        """All rows without their curves: a fraction of what they hold."""
        return map(_row, self.file.execute(f"SELECT {_FACTS}, numbers, {_NONE} FROM rows ORDER BY {_ORDER}"))

    # -- Pieces --

    def mark(self, piece: str, keys: Sequence[str], notes: Sequence[Entry]) -> None:
        """Remembers that a piece is done, which rows it has and what does not apply."""
        facts = (piece, json.dumps(list(keys)), json.dumps(list(notes)))
        try:
            with self.file:
                self.file.execute("INSERT OR REPLACE INTO pieces (id, keys, notes) VALUES (?, ?, ?)", facts)
        except sqlite3.Error as error:
            raise RelpropError(f"Rows cannot be written: {error}; once they can, the same call continues.") from error

    def marked(self, piece: str) -> tuple[list[str], list[Entry]] | None:
        """The keys of a piece that is done, and what does not apply; None for one that is not."""
        found = self.file.execute("SELECT keys, notes FROM pieces WHERE id = ?", (piece,)).fetchone()
        return None if found is None else (json.loads(found[0]), [tuple(note) for note in json.loads(found[1])])

    def claim(self, keys: Iterable[str]) -> None:
        """Says that rows were asked for by this run."""
        with self.file:
            self.file.executemany("INSERT OR IGNORE INTO mine VALUES (?)", ((k,) for k in keys))

    def claimed(self) -> tuple[Row, ...]:
        """The rows that were asked for, in the order of all; where there are very many, without their curves."""
        chosen = "FROM rows WHERE key IN mine"
        many = int(self.file.execute(f"SELECT count(*) {chosen}").fetchone()[0]) > MANY
        query = f"SELECT {_FACTS}, numbers, {_NONE if many else 'curves'} {chosen} ORDER BY {_ORDER}"
        return tuple(_row(found) for found in self.file.execute(query))

    def some(self, keys: Sequence[str], *, curves: bool = False) -> Iterator[Row]:
        """Those of some rows that are here, without their curves unless told."""
        what = f"{_FACTS}, numbers, {'curves' if curves else _NONE}"
        for i in range(0, len(keys), 500):
            few = keys[i : i + 500]
            query = f"SELECT {what} FROM rows WHERE key IN ({','.join('?' * len(few))})"
            yield from map(_row, self.file.execute(query, few))

    # -- Parquet --

    def export(self, path: Path) -> str | None:
        """Writes all rows as one Parquet file, one column a number; some rows at a time are in memory.

        Returns:
            Why it could not be done, or None: the rows are here in any case.
        """
        try:
            pq = importlib.import_module("pyarrow.parquet")
        except ImportError:
            return "Parquet files need pyarrow; install it with pip install 'relprop[study]'."
        schema = self.schema()
        partial = path.with_suffix(".partial")
        with pq.ParquetWriter(partial, schema) as file:
            rows = iter(self)
            while some := list(islice(rows, _GROUP)):
                file.write_table(columns(some, schema))
        partial.replace(path)
        return None

    def schema(self, rows: Iterable[Row] | None = None) -> Any:
        """The columns of some rows, or of all, for Parquet."""
        pa = importlib.import_module("pyarrow")
        kinds: dict[str, Any] = dict.fromkeys(_NAMES, pa.string()) | dict.fromkeys(("label", "target"), pa.int64())
        for row in self if rows is None else rows:
            kinds |= dict.fromkeys(row.values, pa.float64())
            kinds |= {name + _CURVE: pa.list_(pa.float64()) for name in row.curves}
        return pa.schema(list(kinds.items()))


def columns(rows: Sequence[Row], schema: Any) -> Any:
    """Rows as a table of Arrow's."""
    pa = importlib.import_module("pyarrow")
    flat = [
        {name: getattr(r, name) for name in _NAMES}
        | dict(r.values)
        | {name + _CURVE: values for name, values in r.curves.items()}
        for r in rows
    ]
    return pa.Table.from_pylist(flat, schema)


def rows_of(table: Any) -> list[Row]:
    """The rows in a table of Arrow's."""
    rows = []
    for each in table.to_pylist():
        facts = {name: each.pop(name) for name in _NAMES}
        curves = {k.removesuffix(_CURVE): v for k, v in each.items() if k.endswith(_CURVE) and v is not None}
        numbers = {k: v for k, v in each.items() if not k.endswith(_CURVE) and v is not None}
        rows.append(Row(**facts, values=numbers, curves=curves))
    return rows


def chosen(schema: Any, *, curves: bool) -> list[str]:
    """The columns to read, all or those without curves."""
    return [name for name in schema.names if curves or not name.endswith(_CURVE)]


def _row(found: Sequence[Any]) -> Row:
    name, image, label, target, method, metric, protocol, numbers, curves = found
    values = {intern(what): value for what, value in json.loads(numbers).items()}
    # The same few words in a million rows are held once.
    words = (intern(method), intern(metric), intern(protocol))
    return Row(name, intern(image), label, target, *words, values, json.loads(curves))


def read(folder: Path, *, curves: bool = True) -> list[Row]:
    """The rows of a study: from its journal, or where that is gone, from its product, ``rows.parquet``.

    Raises:
        RelpropError: If the folder holds neither.
    """
    path = folder / JOURNAL
    if path.exists():
        with Journal(path) as journal:
            return list(journal if curves else journal.brief())
    if not (folder / PRODUCT).exists():
        raise RelpropError(f"{folder} holds no study; relprop evaluate ... --out {folder} makes one.")
    return product(folder, curves=curves)


def product(folder: Path, *, curves: bool = True) -> list[Row]:
    """The rows of a study's product.

    Raises:
        RelpropError: If it cannot be read.
    """
    path = folder / PRODUCT
    try:
        pq = importlib.import_module("pyarrow.parquet")
        return rows_of(pq.read_table(path, columns=chosen(pq.read_schema(path), curves=curves)))
    except ImportError:
        raise RelpropError(f"{path} needs pyarrow; install it with pip install 'relprop[study]'.") from None
    except (OSError, ValueError) as error:
        raise RelpropError(f"{path} cannot be read: {error}.") from error
