"""Geometry: from pixels of an image file to pixels of what the model sees."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from relprop.preparation import Preparation

__all__ = ["Box", "to_crop"]

Box: TypeAlias = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels; x1 and y1 are the first outside."""

_TURNS = {
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
"""By EXIF orientation: whether x and y change places and then, whether x and y are mirrored."""


def to_crop(
    what: Tensor, size: tuple[int, int], preparation: Preparation | None = None, orientation: int = 1
) -> Tensor:
    """Takes boxes or a mask the way that the image takes: turned, resized, the centre cropped.

    Args:
        what: Boxes ``(N, 4)``, x0, y0, x1, y1 with x1 and y1 the first pixel outside, or a mask ``(H, W)`` of booleans.
        size: Width and height of the image file.
        preparation: How the model wants its images, by default resized to 256 and cropped to 224.
        orientation: How EXIF says that the image is to be turned.

    Returns:
        The boxes clipped to the crop, without those that lie outside; or the mask, ``(crop, crop)``, true where at
        least half of a pixel is.
    """
    preparation = preparation or Preparation()
    swap, mirror_x, mirror_y = _TURNS.get(orientation, (False, False, False))
    if what.dtype == torch.bool:
        mask = what.T if swap else what
        mask = mask.flip([axis for axis, mirror in ((0, mirror_y), (1, mirror_x)) if mirror])
        crop = preparation.cropped(Image.fromarray(mask.numpy().astype(np.uint8) * 255))
        return torch.from_numpy(np.array(crop)[..., 0] > 127)
    boxes = what.double().reshape(-1, 4)
    width, height = size
    if swap:
        boxes, width, height = boxes[:, [1, 0, 3, 2]], height, width
    if mirror_x:
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    if mirror_y:
        boxes = torch.stack([boxes[:, 0], height - boxes[:, 3], boxes[:, 2], height - boxes[:, 1]], 1)
    sides = torch.tensor([width, height])
    resized = preparation.resize * sides // min(width, height)
    corner = torch.tensor([round(float(side - preparation.crop) / 2) for side in resized])
    scaled = boxes * (resized / sides).repeat(2) - corner.repeat(2)
    clipped = scaled.clamp(0, preparation.crop)
    return clipped[(clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])].float()
