"""Streams: datasets that are read entry by entry, so that a million of them begin as soon as ten.

A listing is a text file with an image a line, a path or a URL, and behind a tab its class; or a CSV file with the
columns that tables have elsewhere. Paths are relative to it. A WebDataset shard is a tar file whose members of one name
belong together: ``000123.jpg`` and, if there is one, ``000123.cls`` with its class. Images are not unpacked: it is
remembered where in the shard they lie.
"""

from __future__ import annotations

import csv
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from relprop import images
from relprop.datasets.place import Place, filesystem
from relprop.datasets.sample import Dataset, Sample
from relprop.datasets.tables import FILE, INDEX
from relprop.errors import RelpropError, saying

__all__ = ["Stream", "read"]

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LISTINGS = (".txt", ".tsv", ".csv")


@dataclass(frozen=True)
class Stream:
    """Samples, in order, that are nowhere held all at once.

    Attributes:
        name: What it is called.
        root: Where it was found.
        layout: What that was taken for, in words.
        entries: Begins to read the samples.
        count: How many there are; None where only reading them all would tell.
    """

    name: str
    root: Path
    layout: str
    entries: Callable[[], Iterator[Sample]] = field(repr=False)
    count: int | None = None

    def __iter__(self) -> Iterator[Sample]:
        return self.entries()

    def limit(self, total: int, seed: int = 0) -> Dataset:
        """As a dataset's, which it becomes by that: all entries are read, and no image."""
        return Dataset(self.name, self.root, self.layout, tuple(self)).limit(total, seed)


def read(path: str) -> Stream | None:
    """The stream at a path or URL: a listing, a shard, or several as in ``shards/{000..099}.tar``; None if it is none.

    Raises:
        RelpropError: If it cannot be read.
    """
    path = path if "://" in path else os.fspath(Path(path).expanduser())
    suffix = PurePosixPath(path).suffix.lower()
    name = PurePosixPath(path).stem
    if suffix == ".tar":
        shards = _expanded(path)
        layout = f"{len(shards)} WebDataset shard{'s' if len(shards) > 1 else ''}"
        # Shards are called by what tells them apart, which may begin at a folder.
        same = path.partition("{")[0].rfind("/") + 1
        return Stream(name, Path(path), layout, lambda: (each for shard in shards for each in _shard(shard, same)))
    if suffix in _LISTINGS and ("://" in path or Path(path).is_file()):
        lines = _csv if suffix == ".csv" else _text
        with saying(f"{path} cannot be read"), _opened(path) as file:
            count = sum(1 for line in file if line.strip()) - (suffix == ".csv")
        base = path.rpartition("/")[0] if "://" in path else os.fspath(Path(path).parent)
        return Stream(name, Path(path), "a listing", lambda: lines(path, base), count)
    return None


def _opened(path: str) -> Any:
    if "://" not in path:
        return Path(path).open("rb")
    files, there = filesystem(path)
    return files.open(there, "rb")


# -- Listings --


def _text(path: str, base: str) -> Iterator[Sample]:
    with saying(f"{path} cannot be read"), io.TextIOWrapper(_opened(path), encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            entry, _, label = line.rstrip("\r\n").partition("\t")
            if entry.strip():
                yield _entry(entry.strip(), label, base, f"line {number} of {path}")


def _csv(path: str, base: str) -> Iterator[Sample]:
    with saying(f"{path} cannot be read"), io.TextIOWrapper(_opened(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, restval="")
        there = rows.fieldnames or []
        column, label = (next((name for name in names if name in there), None) for names in (FILE, INDEX))
        if column is None:
            raise RelpropError(f"{path} lists no images; one of its columns has to be {', '.join(FILE)}.")
        for number, row in enumerate(rows, 2):
            yield _entry(row[column], row[label] if label else "", base, f"line {number} of {path}")


def _entry(entry: str, label: str, base: str, where: str) -> Sample:
    label = label.strip()
    if not entry:
        raise RelpropError(f"There is no image in {where}.")
    if label and not label.removeprefix("-").isdecimal():
        raise RelpropError(f"The class {label!r} in {where} is no number.")
    known = int(label) if label else None
    if "://" in entry:
        return Sample(Path(entry.rpartition("/")[2]), known, entry, place=Place(entry))
    if "://" in base:
        return Sample(Path(entry), known, entry, place=Place(f"{base}/{entry}"))
    return Sample(Path(base, entry), known, entry)


# -- Shards --


def _expanded(path: str) -> list[str]:
    """``{000..099}`` written out."""
    found = _BRACES.search(path)
    if found is None:
        return [path]
    first, last = found.groups()
    numbers = range(int(first), int(last) + 1)
    return [each for n in numbers for each in _expanded(_BRACES.sub(str(n).zfill(len(first)), path, count=1))]


def _shard(path: str, same: int) -> Iterator[Sample]:
    """The images of a shard, called by its path without its beginning: only what stands between them is read."""
    shard = path[same:].rpartition(".")[0]
    found: dict[str, Place] = {}
    stem, label = "", None
    with (
        saying(f"The shard {path} cannot be read"),
        _opened(path) as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        for member in tar:
            vars(tar)["members"] = []  # a shard may have any number, and tarfile would keep them all
            if not member.isfile():
                continue
            here, ending = _parted(member.name)
            if here != stem:
                yield from _members(shard, found, label)
                stem, found, label = here, {}, None
            if f".{ending.rpartition('.')[2]}" in images.SUFFIXES:
                found[member.name] = Place(path, member.offset_data, member.size)
            elif ending == "cls":
                text = tar.extractfile(member)
                label = int(text.read()) if text is not None else None
        yield from _members(shard, found, label)


def _parted(name: str) -> tuple[str, str]:
    """A member's name up to the first dot behind its folders, and what follows."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending.lower()


def _members(shard: str, found: dict[str, Place], label: int | None) -> Iterator[Sample]:
    """The image among those of one name: ``000123.jpg``, whatever ``000123.seg.png`` may be."""
    plain = [name for name in found if "." not in _parted(name)[1]] or [*found]
    if len(plain) > 1:
        raise RelpropError(
            f"The shard {shard}.tar has {plain[0]} and {plain[1]}, of which one has to be the image: names of images "
            "differ before their first dot."
        )
    yield from (Sample(Path(name), label, f"{shard}/{name}", place=found[name]) for name in plain)
