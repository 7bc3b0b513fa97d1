"""Tables: labels and boxes as datasets write them down, in CSV, text and XML files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from relprop.classes import imagenet_synsets
from relprop.datasets.geometry import Box
from relprop.errors import RelpropError

__all__ = ["FILE", "INDEX", "Labels", "boxes_of", "labels_of", "read_pairs", "read_xml", "synset_index"]

Labels = Mapping[str, int]
"""Classes, by file name without its ending."""

FILE = ("file", "filename", "file_name", "image", "path", "ImageId")
INDEX = ("class_index", "imagenet_index", "index", "label", "target", "class")
_SYNSET = ("synset", "wnid")
_CORNERS = ("x0", "y0", "x1", "y1")
_KAGGLE = "PredictionString"  # of LOC_val_solution.csv: a synset and four corners, as often as there are objects


def labels_of(root: Path) -> tuple[Labels, str] | None:
    """The classes that a CSV file or ``val.txt`` in a folder tells, and the file's name; None without one."""
    for path in _tables(root):
        rows = _rows(path)
        file, index, synset = (_column(rows, names) for names in (FILE, INDEX, _SYNSET))
        if file and index and all(row[index].lstrip("-").isdigit() for row in rows):
            return {Path(row[file]).stem: int(row[index]) for row in rows}, path.name
        if file and synset:
            return {Path(row[file]).stem: synset_index(row[synset], path) for row in rows}, path.name
        if file and rows and _KAGGLE in rows[0]:
            return {row[file]: synset_index(row[_KAGGLE].split()[0], path) for row in rows}, path.name
    if (root / "val.txt").is_file():
        return {Path(name).stem: int(index) for name, index in read_pairs(root / "val.txt")}, "val.txt"
    return None


def boxes_of(source: Path) -> Callable[[Path], tuple[Box, ...] | Path]:
    """What finds the boxes of an image file: in a CSV file, in a folder's CSV files, or in XML files of its name.

    Raises:
        RelpropError: If a file that was named holds no boxes.
    """
    found: dict[str, list[Box]] = {}
    for path in _tables(source) if source.is_dir() else [source]:
        rows = _rows(path)
        file = _column(rows, FILE)
        if file and rows and set(_CORNERS) <= rows[0].keys():
            for row in rows:
                found.setdefault(Path(row[file]).stem, []).append(_box([row[c] for c in _CORNERS], path))
        elif file and rows and _KAGGLE in rows[0]:
            for row in rows:
                words = row[_KAGGLE].split()
                found[row[file]] = [_box(words[i + 1 : i + 5], path) for i in range(0, len(words), 5)]
        elif path == source:
            raise RelpropError(f"{path} holds no boxes; its columns have to be file, {', '.join(_CORNERS)}.")
    if found:
        return lambda path: tuple(found.get(path.stem, ()))
    folders = [source, *(source / f for f in ("Annotations/CLS-LOC/val", "ILSVRC/Annotations/CLS-LOC/val"))]
    folders += [source / name for name in ("annotations", "boxes", "bbox_val", "val")]
    here = next((f for f in folders if f.is_dir() and next(f.glob("*.xml"), None)), None)
    there = {path.stem: path for path in here.glob("*.xml")} if here else {}
    return lambda path: there.get(path.stem, ())


def read_xml(path: Path) -> tuple[Box, ...]:
    """The boxes of an annotation in ILSVRC's (and PASCAL VOC's) XML.

    Raises:
        RelpropError: If it cannot be read.
    """
    try:
        corners = ElementTree.parse(path).getroot().iter("bndbox")
        names = ("xmin", "ymin", "xmax", "ymax")
        return tuple(_box([box.findtext(name, "") for name in names], path) for box in corners)
    except (OSError, ElementTree.ParseError) as error:
        raise RelpropError(f"The annotation {path} cannot be read: {error}.") from error


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Two words a line, the second to the end of the line.

    Raises:
        RelpropError: If the file cannot be read, or a line has one word.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RelpropError(f"{path} cannot be read: {error}.") from error
    pairs = [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]
    bad = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if bad is not None:
        raise RelpropError(f"Line {bad + 1} of {path} is {' '.join(pairs[bad])!r}, not a name and a value.")
    return [(first, second.strip()) for first, second in pairs]


_INDICES = {synset: index for index, synset in enumerate(imagenet_synsets())}


def synset_index(synset: str, path: Path) -> int:
    """The class of a synset.

    Raises:
        RelpropError: If ImageNet's thousand do not have it.
    """
    if synset not in _INDICES:
        raise RelpropError(f"{path} names {synset!r}, which is none of ImageNet's 1000 synsets.")
    return _INDICES[synset]


def _box(corners: Sequence[str], path: Path) -> Box:
    """ILSVRC counts pixels from 0 and includes the last one, so the first outside is one further."""
    try:
        x0, y0, x1, y1 = map(float, corners)
    except ValueError as error:
        raise RelpropError(f"{path} has a box {' '.join(corners)!r}, which is not four numbers.") from error
    return x0, y0, x1 + 1, y1 + 1


def _tables(root: Path) -> list[Path]:
    """A folder's CSV files, those about boxes last."""
    return sorted(root.glob("*.csv"), key=lambda path: ("box" in path.name.lower(), path.name))


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [{key: value or "" for key, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RelpropError(f"{path} cannot be read: {error}.") from error


def _column(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str | None:
    return next((name for name in names if rows and name in rows[0]), None)
