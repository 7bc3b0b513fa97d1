"""Any folder of images: one folder a class, or all in one with a table of their classes, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from relprop import images
from relprop.datasets.sample import Dataset, Sample
from relprop.datasets.tables import boxes_of, labels_of
from relprop.errors import RelpropError

__all__ = ["flat", "listed", "read", "subfolders"]

_MASKS = {"segmentations": False, "masks": False, "trimaps": True}
"""Folders of masks beside the images, and whether they are trimaps."""


def read(root: Path, boxes: Path | None = None) -> Dataset | None:
    """The dataset in a folder of images; None if it has none.

    A folder of class folders is read as torchvision's ``ImageFolder`` does: classes are the folders by name. Images
    side by side have the classes of a CSV file beside them, or none.
    """
    classes = [folder for folder in subfolders(root) if folder.name not in _MASKS and listed(folder)]
    if classes and not listed(root, deep=False) and not listed(root / "images", deep=False):
        files: list[tuple[Path, int | None]] = [(f, i) for i, folder in enumerate(classes) for f in listed(folder)]
        names = tuple(folder.name for folder in classes)
        layout = f"one folder a class, the {len(names)} by name"
        return Dataset(root.name, root, layout, _samples(root, root, files, boxes), names)
    return flat(root, boxes)


def flat(root: Path, boxes: Path | None = None, place: Path | None = None) -> Dataset | None:
    """The dataset of images side by side, in a folder, in ``images`` in it or in the place given; None without any."""
    place = place or (root / "images" if listed(root / "images", deep=False) else root)
    files = listed(place, deep=False)
    if not files:
        return None
    labels, source = labels_of(root) or ({}, "")
    unknown = [file.name for file in files if file.stem not in labels]
    if source and unknown:
        raise RelpropError(
            f"{root / source} does not tell the class of {len(unknown)} of the {len(files)} images, such as "
            f"{unknown[0]}."
        )
    layout = f"images with classes in {source}" if source else "images without classes"
    return Dataset(root.name, root, layout, _samples(root, place, [(f, labels.get(f.stem)) for f in files], boxes))


def _samples(root: Path, place: Path, files: list[tuple[Path, int | None]], boxes: Path | None) -> tuple[Sample, ...]:
    """Samples, with the boxes and masks that are beside them."""
    find = boxes_of(boxes or root)
    folder = next((root / name for name in _MASKS if (root / name).is_dir()), None)
    made = []
    for file, label in files:
        name = file.relative_to(place)
        mask = folder / name.with_suffix(".png") if folder else None
        made.append(
            Sample(
                file,
                label,
                name.as_posix(),
                find(file),
                mask if mask and mask.is_file() else None,
                trimap=folder is not None and _MASKS[folder.name],
            )
        )
    return tuple(made)


def subfolders(root: Path) -> list[Path]:
    """The folders in a folder, by name."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def listed(folder: Path, *, deep: bool = True) -> list[Path]:
    """The image files in a folder, by name; those below it too if ``deep``."""
    if not folder.is_dir():
        return []
    return sorted(map(Path, _images(os.fspath(folder), deep)))


def _images(folder: str, deep: bool) -> Iterator[str]:
    """Without asking the system about every file: there may be a million."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _images(entry.path, deep) if deep else ()
            elif os.path.splitext(entry.name)[1].lower() in images.SUFFIXES:  # noqa: PTH122
                # A link may lead nowhere, or in a circle: os.path says no where an entry would raise.
                there = os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()  # noqa: PTH113
                yield from [entry.path] if there and not entry.name.startswith(".") else ()
