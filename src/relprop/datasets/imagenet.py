"""ImageNet's validation set (Russakovsky et al., 2015), in the layouts in which people keep it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from relprop.datasets.folder import flat, listed, subfolders
from relprop.datasets.sample import Dataset, Sample
from relprop.datasets.tables import boxes_of, labels_of, synset_index
from relprop.errors import RelpropError

__all__ = ["read"]

_SYNSET = re.compile(r"n\d{8}")
_PLACES = (".", "val", "images", "Data/CLS-LOC/val", "ILSVRC/Data/CLS-LOC/val")
"""Where the images may be below the folder that was named."""

_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def read(root: Path, boxes: Path | None = None) -> Dataset | None:
    """ImageNet's validation images in a folder; None if it is none of the layouts.

    - synset folders, ``n01440764/*.JPEG``
    - folders named by class index, ``0/*.JPEG`` to ``999/*.JPEG``
    - all images in one folder, with the development kit's ground truth, Kaggle's ``LOC_val_solution.csv``,
      ``val.txt`` (file, index) or any CSV file with a file and a class index or synset

    Args:
        root: The folder.
        boxes: A CSV file (file, x0, y0, x1, y1) or a folder of XML annotations; by default what is in the folder.

    Raises:
        RelpropError: If the folder is such a layout, but something in it does not fit.
    """
    for place in (root / name for name in _PLACES):
        if not place.is_dir():
            continue
        names = [folder.name for folder in subfolders(place)]
        if names and all(map(_SYNSET.fullmatch, names)):
            classes = {name: synset_index(name, place) for name in names}
            return _folders(root, place, classes, "synset folders", boxes)
        if names and all(name.isdigit() and int(name) < 1000 for name in names):
            return _folders(root, place, {name: int(name) for name in names}, "folders named by class index", boxes)
    for place in (root / name for name in _PLACES):
        files = listed(place, deep=False)
        if files and (truth := _truth(root)):
            find = boxes_of(boxes or root)
            samples = tuple(Sample(file, _nth(truth, file), file.name, find(file)) for file in files)
            return Dataset(root.name, root, "images with the development kit's ground truth", samples)
        if files and labels_of(root):
            return flat(root, boxes, place)
    return None


def _folders(root: Path, place: Path, classes: dict[str, int], layout: str, boxes: Path | None) -> Dataset:
    find = boxes_of(boxes or root)
    samples = tuple(
        Sample(file, label, f"{name}/{file.name}", find(file))
        for name, label in sorted(classes.items(), key=lambda item: item[1])
        for file in listed(place / name)
    )
    if not samples:
        raise RelpropError(f"The {layout} in {place} hold no images.")
    return Dataset(root.name, root, layout, samples)


def _truth(root: Path) -> list[int] | None:
    """The class of each validation image by the development kit, which numbers classes in an order of its own."""
    folders = [root, root / "data", *(kit / "data" for kit in sorted(root.glob("*devkit*")))]
    folder = next((folder for folder in folders if (folder / _TRUTH).is_file()), None)
    if folder is None:
        return None
    meta = folder / "meta.mat"
    try:
        loadmat = importlib.import_module("scipy.io").loadmat  # only the development kit's own format needs it
    except ImportError as error:
        raise RelpropError(f"{meta} needs scipy to be read; install it with pip install scipy.") from error
    try:
        synsets = {int(row[0]): str(row[1]) for row in loadmat(meta, squeeze_me=True)["synsets"]}
        numbers = [int(line) for line in (folder / _TRUTH).read_text().split()]
        return [synset_index(synsets[number], meta) for number in numbers]
    except (OSError, KeyError, ValueError) as error:
        raise RelpropError(f"The development kit in {folder} cannot be read: {error!r}.") from error


def _nth(truth: list[int], file: Path) -> int:
    """The class of the image whose number is at the end of its name."""
    number = re.search(r"(\d{8})$", file.stem)
    if number is None or not 1 <= int(number[1]) <= len(truth):
        raise RelpropError(f"{file} is not named ILSVRC2012_val_ and a number up to {len(truth)}.")
    return truth[int(number[1]) - 1]
