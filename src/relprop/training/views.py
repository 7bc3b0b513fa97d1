"""Views: the crops of a photo that training sees; which one is decided by lot, the same lot for the same words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from PIL import Image, ImageOps
from torch import Tensor

from relprop.datasets import Sample
from relprop.preparation import Preparation

__all__ = ["lot", "view", "views"]


def lot(*words: object) -> int:
    """A number below 2**63 that depends on these words alone: not on the process, its past or the machine."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:8], "big") >> 1


def view(path: Path, preparation: Preparation, number: int) -> Tensor:
    """A crop at a random place, at the scale that the model sees in tests, and in half of the cases its mirror image.

    Args:
        path: The photo.
        preparation: How the model wants its images.
        number: A lot.

    Raises:
        RelpropError: If the photo cannot be read.
    """
    image, draw, side = preparation.resized(path), Random(number), preparation.crop
    # Where the photo is smaller than the crop, it stays in the middle.
    left, top = (
        draw.randint(0, extent - side) if extent > side else (extent - side) // 2
        for extent in (image.width, image.height)
    )
    crop: Image.Image = image.crop((left, top, left + side, top + side))
    return preparation.normalised(ImageOps.mirror(crop) if draw.random() < 0.5 else crop)


def views(samples: Iterable[Sample], preparation: Preparation, *words: object) -> Callable[[Path], Tensor]:
    """What prepares the photos of some samples, each by its own lot of its name and these words."""
    names = {sample.path: sample.name for sample in samples}
    return lambda path: view(path, preparation, lot(*words, names[path]))
