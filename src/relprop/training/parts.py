"""Parts: what a dataset gives to training, to validation and to the test."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

from relprop.datasets import Dataset, cub, folder
from relprop.errors import RelpropError

__all__ = ["Parts", "open_birds", "open_folder"]

_TENTH, _FIFTH = 0.1, 0.2
_FIXED = 0
"""The seed of a test set that is drawn: every training seed has the same."""


@dataclass(frozen=True)
class Parts:
    """Three datasets with the same classes, and no image in two of them.

    Attributes:
        train: What weights are fitted to.
        validation: What decides when to stop.
        test: What nothing is decided by.
        classes: The names of the classes.
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, part in self.items():
            if not len(part):
                raise RelpropError(f"{part.root} has too few images: none is left for {name}.")

    def items(self) -> list[tuple[str, Dataset]]:
        """The parts by name."""
        return [("training", self.train), ("validation", self.validation), ("test", self.test)]

    def __str__(self) -> str:
        sizes = ", ".join(f"{len(part)} for {name}" for name, part in self.items())
        return f"{self.train.name}: {len(self.classes)} classes, {sizes}"

    def write(self, path: Path) -> None:
        """Writes down which image is in which part."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["image", "class", "part"])
            writer.writerows([s.name, self.classes[s.label or 0], name] for name, part in self.items() for s in part)


def open_birds(root: Path, seed: int = 0) -> Parts:
    """CUB-200-2011: the official test set, and the official training set parted 5,394 / 600 by a seed.

    The validation images are spread over the classes, three of each. A set with fewer images gives a tenth of them.

    Raises:
        RelpropError: If the folder does not hold it.
    """
    train, test = (cub.read(root, split) for split in ("train", "test"))
    if train is None or test is None:
        raise RelpropError(f"{root} is not CUB-200-2011: it has no images.txt and image_class_labels.txt.")
    if train.classes is None:
        raise RelpropError(f"{root} has no classes.txt with the names of the classes.")
    return _parted(train, test, train.classes, seed)


def open_folder(root: Path, seed: int = 0) -> Parts:
    """A folder of class folders, as torchvision's ``ImageFolder`` has it.

    With ``train`` and ``test`` in it, each of them such a folder, these are the parts, and ``val``, if it is there,
    validates; with ``train`` and ``val`` alone, ``val`` is the test. What is lacking is drawn, spread over the classes:
    a fifth for the test, the same for every seed, and a tenth of the rest for validation, by the seed.

    Raises:
        RelpropError: If the folder has another layout, or the parts have different classes.
    """
    found = {name: _folder(root / name) for name in ("train", "val", "test") if (root / name).is_dir()}
    if "train" not in found:
        whole = _folder(root)
        test = whole.limit(math.ceil(_FIFTH * len(whole)), _FIXED)
        return _parted(_without(whole, test), test, whole.classes or (), seed)
    train, validation, test_set = found["train"], found.get("val"), found.get("test")
    if test_set is None:
        validation, test_set = None, validation
    if test_set is None:
        raise RelpropError(f"{root} has train, but neither test nor val beside it.")
    for other in (validation, test_set):
        if other is not None and other.classes != train.classes:
            odd = sorted({*(other.classes or ())} ^ {*(train.classes or ())})
            raise RelpropError(f"{train.root} and {other.root} have different classes, such as {odd[0]}.")
    if validation is None:
        return _parted(train, test_set, train.classes or (), seed)
    return Parts(replace(train, name=root.name), validation, test_set, train.classes or ())


def _folder(root: Path) -> Dataset:
    found = folder.read(root) if root.is_dir() else None
    if found is None or not found.classes or len(found.classes) < 2:
        raise RelpropError(f"{root} is not a folder with a folder of images for each of two classes or more.")
    return found


def _parted(train: Dataset, test: Dataset, classes: tuple[str, ...], seed: int) -> Parts:
    validation = train.limit(math.ceil(_TENTH * len(train)), seed)
    return Parts(_without(train, validation), validation, test, classes)


def _without(whole: Dataset, part: Dataset) -> Dataset:
    taken = {sample.name for sample in part}
    return replace(whole, samples=tuple(sample for sample in whole if sample.name not in taken))
