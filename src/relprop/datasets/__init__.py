"""Datasets: ImageNet's validation set, CUB-200-2011 or any folder of images, with boxes and masks where there are any.

What is too large for a folder, or elsewhere, is a stream: a listing of paths and URLs, or WebDataset shards.

``datasets.open(path)`` looks at what is in a folder and says what it took it for; ``print`` shows it.
"""

from __future__ import annotations

import os
from pathlib import Path

from relprop.datasets import cub, folder, imagenet
from relprop.datasets.geometry import Box, to_crop
from relprop.datasets.loader import Batch, batches
from relprop.datasets.place import Place
from relprop.datasets.sample import Dataset, Sample
from relprop.datasets.streams import Stream
from relprop.errors import RelpropError

__all__ = ["Batch", "Box", "Dataset", "Place", "Sample", "Stream", "batches", "open", "to_crop"]

_LAYOUTS = (
    "ImageNet's synset folders (n01440764/), folders named by class index (0/ to 999/), CUB-200-2011 (images.txt), one "
    "folder a class, or images with or without a CSV file of their classes; a listing (.txt, .csv) or a WebDataset "
    "shard (.tar)"
)


def open(  # noqa: A001 - as `PIL.Image.open`: it is called by the module's name
    path: str | os.PathLike[str],
    *,
    split: str = "test",
    boxes: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Opens the dataset in a folder.

    Args:
        path: The folder.
        split: Of CUB-200-2011: ``"test"``, ``"train"`` or ``"all"``.
        boxes: Boxes that are kept elsewhere: a CSV file with the columns file, x0, y0, x1 and y1, in pixels from 0,
            the last included, or a folder of ILSVRC's XML annotations.

    Returns:
        The dataset; its ``layout`` says what the folder was taken for.

    Raises:
        RelpropError: If there is no such folder, it has none of the layouts, or something in it does not fit.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "is not there"
        raise RelpropError(f"The dataset {root} {what}; relprop reads {_LAYOUTS}.")
    elsewhere = None if boxes is None else Path(boxes).expanduser()
    if elsewhere is not None and not elsewhere.exists():
        raise RelpropError(f"The boxes {elsewhere} are not there.")
    found = cub.read(root, split) or imagenet.read(root, elsewhere) or folder.read(root, elsewhere)
    if found is None or not len(found):
        raise RelpropError(f"{root} holds no dataset that relprop reads: {_LAYOUTS}.")
    return found
