"""Damage: what is missing or broken in a download of CUB-200-2011, by file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from relprop import images
from relprop.datasets import Dataset, cub
from relprop.errors import RelpropError

__all__ = ["Finding", "birds", "refuse", "unreadable"]

IMAGES, TRAIN, TEST, CLASSES = 11_788, 5_994, 5_794, 200
"""Of the official set."""
TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")

_SHOWN, _THREADS = 3, 2


class Finding(NamedTuple):
    """Something that is not as it should be.

    Attributes:
        path: The file.
        what: What is the matter with it.
        grave: Whether training cannot go on with it; else it is something to know.
    """

    path: Path
    what: str
    grave: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def birds(root: Path, *, deep: bool = True) -> Iterator[Finding]:
    """Looks through CUB-200-2011.

    Args:
        root: The folder, or the one that holds ``CUB_200_2011``.
        deep: Whether every image is decoded, to the last pixel; else it is enough that there is one.

    Yields:
        What is found, the tables before the images.
    """
    home = next((h for h in (root, root / "CUB_200_2011") if (h / TABLES[0]).is_file()), root)
    lacking = [Finding(home / table, "is missing") for table in TABLES if not (home / table).is_file()]
    yield from lacking
    if lacking:
        return
    try:
        every, train, test = (cub.read(root, split) for split in ("all", "train", "test"))
    except RelpropError as error:
        yield Finding(home, str(error).removeprefix(str(home)).strip().rstrip("."))
        return
    assert every is not None  # its tables are there
    assert train is not None
    assert test is not None
    yield from _counts(home, every, train, test)
    yield from unreadable(every, deep=deep)
    masks = sum(sample.mask_path is not None for sample in every)
    if masks < len(every):
        say = f"has masks of {masks} of {len(every)} images; others are localised by their boxes"
        yield Finding(home / "segmentations", say, grave=False)


def _counts(home: Path, every: Dataset, train: Dataset, test: Dataset) -> Iterator[Finding]:
    classes = len(every.classes or ())
    if unknown := [s for s in every if not 0 <= (s.label or 0) < classes]:
        what = f"gives {unknown[0].name} class {(unknown[0].label or 0) + 1}, and classes.txt names {classes}"
        yield Finding(home / TABLES[1], what)
    for table, found, official, what in (
        (TABLES[0], len(every), IMAGES, "images"),
        (TABLES[2], len(train), TRAIN, "training images"),
        (TABLES[2], len(test), TEST, "test images"),
        (TABLES[3], classes, CLASSES, "classes"),
    ):
        if found != official:
            yield Finding(home / table, f"lists {found:,} {what}; the official set has {official:,}", grave=False)


def unreadable(data: Dataset, *, deep: bool) -> Iterator[Finding]:
    """The image files of a dataset that are missing, empty or damaged."""
    look: Callable[[Path], str | None] = _decoded if deep else _there
    with ThreadPoolExecutor(_THREADS) as pool:
        paths = [sample.path for sample in data]
        for path, what in zip(paths, pool.map(look, paths), strict=True):
            if what:
                yield Finding(path, what)


def _there(path: Path) -> str | None:
    try:
        return None if path.stat().st_size else "is empty"
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)


def _decoded(path: Path) -> str | None:
    what = _there(path)
    if what is None:
        try:
            images.read(path)
        except RelpropError as error:
            what = str(error).removeprefix(str(path)).strip().rstrip(".")
    return what


def refuse(findings: list[Finding]) -> None:
    """Stops before training starts if something grave was found.

    Raises:
        RelpropError: With the first few, and how many there are.
    """
    grave = [finding for finding in findings if finding.grave]
    if grave:
        some = "; ".join(map(str, grave[:_SHOWN]))
        more = f"; and {len(grave) - _SHOWN} more, which --check lists" if len(grave) > _SHOWN else ""
        raise RelpropError(f"The dataset is not whole: {some}{more}.")
