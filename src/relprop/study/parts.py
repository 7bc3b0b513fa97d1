"""Parts: the rows of a study as Parquet files at a URL, some thousand in each, while it goes on.

Which rows are in which part is written down in the journal before the part is written, so that a part that was lost
when the driver was killed is written again, whole and the same, and no row is in two parts. Where the journal is lost
with its machine, the parts bring it back.

A part has the columns of its own rows. An empty file that comes first has those of all: who reads the folder as one
table, as pandas does, goes by the first.
"""

from __future__ import annotations

import importlib
import json
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from relprop.datasets.place import filesystem
from relprop.errors import RelpropError, saying
from relprop.study.journal import Journal, Row, chosen, columns, rows_of

__all__ = ["Parts", "fetch"]

ROWS = 5000
SECONDS = 60.0
"""A part is written when there are so many rows, or so much time has passed."""

_COLUMNS = "columns.parquet"


class Parts:
    """The parts of a journal.

    Args:
        url: The folder for them, at any URL that fsspec knows.
        journal: The rows.

    Raises:
        RelpropError: If it cannot be reached.
    """

    def __init__(self, url: str, journal: Journal) -> None:
        self._url, self._journal, self._file = url, journal, journal.file
        self._files, self._folder = filesystem(url.rstrip("/"))
        self._session, self._count, self._when = uuid.uuid4().hex[:8], 0, time.monotonic()
        self._pq, self._columns = _parquet(), importlib.import_module("pyarrow").schema([])
        with self._file:
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS shipped (part TEXT, key TEXT, PRIMARY KEY (part, key)) WITHOUT ROWID"
            )
            self._file.execute("CREATE INDEX IF NOT EXISTS shipped_keys ON shipped (key)")
        with self._saying():
            self._files.makedirs(f"{self._folder}/rows", exist_ok=True)
            there = _listed(self._files, self._folder)
            known = {part for (part,) in self._file.execute("SELECT DISTINCT part FROM shipped")}
            for name in sorted(there - known):
                self._restore(name)
            if self._files.exists(first := f"{self._folder}/rows/{_COLUMNS}"):
                self._columns = self._pq.read_schema(_content(self._files, first))
            elif there | known:
                self._widen(journal.schema())
            for name in sorted(known - there):
                self._write(name)
        waiting = "SELECT key FROM rows WHERE key NOT IN (SELECT key FROM shipped)"
        self._keys = [k for (k,) in self._file.execute(waiting)]
        self._pieces = [i for (i,) in self._file.execute("SELECT id FROM pieces WHERE part IS NULL")]

    def take(self, rows: Sequence[Row]) -> None:
        """Takes in rows."""
        self._keys += [row.key for row in rows]

    def done(self, piece: str) -> None:
        """Takes in that a piece is done, and writes a part if it is time to.

        Raises:
            RelpropError: If it cannot be written.
        """
        self._pieces.append(piece)
        if len(self._keys) >= ROWS or time.monotonic() - self._when > SECONDS:
            self.ship()

    def ship(self) -> None:
        """Writes what waits to be written.

        Raises:
            RelpropError: If it cannot be.
        """
        self._when = time.monotonic()
        if not self._keys:  # pieces without rows wait for some; where they are lost, there is nothing to compute
            return
        self._count += 1
        name = f"part-{self._session}-{self._count:06d}.parquet"
        # A row that was computed again, in the company of one that was lacking, is in a part already.
        once = "INSERT INTO shipped SELECT ?1, ?2 WHERE NOT EXISTS (SELECT 1 FROM shipped WHERE key = ?2)"
        with self._file:
            self._file.executemany(once, ((name, k) for k in self._keys))
            self._file.executemany("UPDATE pieces SET part = ? WHERE id = ?", ((name, i) for i in self._pieces))
        self._keys, self._pieces = [], []
        with self._saying():
            self._write(name)

    def put(self, name: str, text: str) -> None:
        """Writes a file beside the rows.

        Raises:
            RelpropError: If it cannot be written.
        """
        with self._saying():
            self._files.pipe_file(f"{self._folder}/{name}", text.encode())

    def _write(self, name: str) -> None:
        """Writes a part."""
        keys = [k for (k,) in self._file.execute("SELECT key FROM shipped WHERE part = ?", (name,))]
        marks = self._file.execute("SELECT id, keys, notes FROM pieces WHERE part = ?", (name,)).fetchall()
        rows = list(self._journal.some(keys, curves=True))
        schema = self._journal.schema(rows)
        self._widen(schema)
        self._store(name, columns(rows, schema.with_metadata({"relprop": json.dumps(marks)})))

    def _widen(self, schema: Any) -> None:
        """Sees to it that the first file has these columns too."""
        wide = importlib.import_module("pyarrow").unify_schemas([self._columns, schema])
        if wide != self._columns:
            self._store(_COLUMNS, columns([], wide))
            self._columns = wide

    def _store(self, name: str, table: Any) -> None:
        """Writes a file, whole or not at all."""
        sink = importlib.import_module("pyarrow").BufferOutputStream()
        self._pq.write_table(table, sink)
        path = f"{self._folder}/rows/{name}"
        self._files.pipe_file(f"{path}.partial", sink.getvalue().to_pybytes())
        self._files.mv(f"{path}.partial", path)

    def _restore(self, name: str) -> None:
        rows, marks = _part(self._files, f"{self._folder}/rows/{name}")
        self._journal.add(rows)
        with self._file:
            self._file.executemany("INSERT INTO shipped VALUES (?, ?)", ((name, row.key) for row in rows))
            self._file.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?, ?, ?)", ((*m, name) for m in marks))

    def _saying(self) -> AbstractContextManager[None]:
        return saying(f"The rows cannot be written to {self._url}", "; once they can, the same call continues")


def fetch(url: str, *, curves: bool = True) -> list[Row]:
    """The rows at a URL.

    Raises:
        RelpropError: If there are none, or they cannot be read.
    """
    files, folder = filesystem(url.rstrip("/"))
    names, found = set[str](), dict[str, Row]()
    with saying(f"{url} cannot be read"):
        with suppress(FileNotFoundError):
            names = _listed(files, folder)
        for name in sorted(names):
            found |= {row.key: row for row in _part(files, f"{folder}/rows/{name}", curves=curves)[0]}
    if not names:
        raise RelpropError(f"{url} holds no study; relprop evaluate ... --out {url} makes one.")
    return sorted(found.values(), key=lambda row: (row.metric, row.protocol, row.method, row.image, row.key))


def _listed(files: Any, folder: str) -> set[str]:
    names = {str(path).rpartition("/")[2] for path in files.ls(f"{folder}/rows", detail=False)}
    return {name for name in names if name.startswith("part-") and name.endswith(".parquet")}


def _part(files: Any, path: str, *, curves: bool = True) -> tuple[list[Row], list[Any]]:
    pq, content = _parquet(), _content(files, path)
    schema = pq.read_schema(content)
    table = pq.read_table(content, columns=chosen(schema, curves=curves))
    return rows_of(table), json.loads((schema.metadata or {}).get(b"relprop", b"[]"))


def _content(files: Any, path: str) -> Any:
    return importlib.import_module("pyarrow").BufferReader(files.cat_file(path))


def _parquet() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise RelpropError("Parquet files need pyarrow; install it with pip install 'relprop[study]'.") from None
