"""Caltech-UCSD Birds-200-2011 (Wah et al., 2011), in its official layout."""

from __future__ import annotations

from pathlib import Path

from relprop.datasets.sample import Dataset, Point, Sample
from relprop.datasets.tables import read_pairs
from relprop.errors import RelpropError

__all__ = ["SPLITS", "read"]

SPLITS = {"test": ("0",), "train": ("1",), "all": ("0", "1")}
_TABLES = ("images.txt", "image_class_labels.txt")


def read(root: Path, split: str = "test") -> Dataset | None:
    """The birds in a folder with ``images.txt`` and ``image_class_labels.txt``; None if it has not both.

    Boxes, visible parts and segmentations come along where their files are there.

    Args:
        root: The folder, or the one that holds ``CUB_200_2011``.
        split: ``"test"``, ``"train"`` or ``"all"``, by ``train_test_split.txt``.

    Raises:
        RelpropError: If there is no such split, or the tables do not fit together.
    """
    home = next((home for home in (root, root / "CUB_200_2011") if all((home / t).is_file() for t in _TABLES)), None)
    if home is None:
        return None
    if split not in SPLITS:
        raise RelpropError(f"There is no split {split!r}; there are {', '.join(SPLITS)}.")
    files, labels = (dict(read_pairs(home / table)) for table in _TABLES)
    splits, boxes, names = (_table(home / f"{t}.txt") for t in ("train_test_split", "bounding_boxes", "classes"))
    parts = _parts(home / "parts")
    masks = next((m for m in (home / "segmentations", root / "segmentations") if m.is_dir()), None)
    samples = []
    for key, file in files.items():
        if splits.get(key, "0") not in SPLITS[split]:
            continue
        if key not in labels:
            raise RelpropError(f"{home / _TABLES[1]} does not tell the class of image {key}, {file}.")
        mask = masks / Path(file).with_suffix(".png") if masks else None
        x, y, width, height = map(float, boxes[key].split()) if key in boxes else (0.0,) * 4
        samples.append(
            Sample(
                home / "images" / file,
                int(labels[key]) - 1,
                file,
                ((x, y, x + width, y + height),) if key in boxes else (),
                mask if mask and mask.is_file() else None,
                parts=parts.get(key, {}),
            )
        )
    if not samples:
        raise RelpropError(f"{home} has no images in the split {split!r}; there are {', '.join(SPLITS)}.")
    layout = f"CUB-200-2011, {'the official ' if splits else ''}{split} split"
    return Dataset(root.name, root, layout, tuple(samples), tuple(names.values()) or None)


def _table(path: Path) -> dict[str, str]:
    return dict(read_pairs(path)) if path.is_file() else {}


def _parts(folder: Path) -> dict[str, dict[str, Point]]:
    """The visible parts of each image, by name."""
    names = _table(folder / "parts.txt")
    found: dict[str, dict[str, Point]] = {}
    for key, rest in read_pairs(folder / "part_locs.txt") if (folder / "part_locs.txt").is_file() else ():
        part, x, y, visible = rest.split()
        if visible == "1":
            found.setdefault(key, {})[names.get(part, part)] = (float(x), float(y))
    return found
