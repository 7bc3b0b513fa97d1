"""Preparation: how an image becomes an input."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from relprop import images
from relprop.errors import RelpropError

Picture: TypeAlias = Image.Image | str | os.PathLike[str]
"""An image, or the path of one."""

_LONGEST = 64


class Normalization(NamedTuple):
    """What is subtracted from red, green and blue in 0..1, and what they are divided by then."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preparation:
    """How an image becomes an input: the shorter side resized, the centre cropped, the colours normalised."""

    resize: int = 256
    crop: int = 224
    interpolation: str = "bilinear"
    normalization: Normalization = field(default_factory=Normalization)

    @classmethod
    def read(cls, text: str) -> Preparation:
        """What :meth:`written` wrote.

        Raises:
            Exception: Something else did.
        """
        facts = json.loads(text)
        mean, std = ([float(value) for value in values] for values in facts["normalization"])
        if not len(mean) == len(std) == 3 or min(int(facts["resize"]), int(facts["crop"])) < 1:
            raise ValueError(text)
        Image.Resampling[facts["interpolation"].upper()]
        return cls(**{**facts, "normalization": Normalization(tuple(mean), tuple(std))})

    def written(self) -> str:
        """As JSON, for a weights file."""
        return json.dumps({**asdict(self), "normalization": list(self.normalization)})

    def prepared(self, image: Picture) -> Tensor:
        """What a model sees of an image, as it wants it, ``(3, H, W)``.

        Raises:
            RelpropError: The image cannot be read.
        """
        return self.normalised(self.cropped(image))

    def cropped(self, image: Picture) -> Image.Image:
        """The part of an image that a model sees, at the size it sees it.

        Raises:
            RelpropError: The image cannot be read.
        """
        return _centre(self.resized(image), [self.crop] * 2)

    def resized(self, image: Picture) -> Image.Image:
        """An image at the size that the crop is taken from.

        Raises:
            RelpropError: The image cannot be read.
        """
        return _resized(_opened(image), self)

    def normalised(self, crop: Image.Image) -> Tensor:
        """The colours of a crop as a model wants them, ``(3, H, W)``."""
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous().float() / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in self.normalization)
        return (pixels - mean) / std


def _opened(image: Picture) -> Image.Image:
    if isinstance(image, str | os.PathLike):
        return images.read(image)
    if not isinstance(image, Image.Image):
        raise RelpropError(f"The image is a {type(image).__name__}; pass a PIL image or a path.")
    if not image.width or not image.height:
        raise RelpropError("The image has no pixels.")
    return images.rgb(image)


def _resized(image: Image.Image, preparation: Preparation) -> Image.Image:
    """The same pixels as torchvision's ``Resize``; those of :func:`_centre` are ``CenterCrop``'s."""
    shorter = min(image.size)
    if max(image.size) > _LONGEST * shorter:  # a line of pixels would become a huge image before it is cropped
        image = _centre(image, [min(side, _LONGEST * shorter) for side in image.size])
    resized = (preparation.resize * image.width // shorter, preparation.resize * image.height // shorter)
    return image.resize(resized, Image.Resampling[preparation.interpolation.upper()])


def _centre(image: Image.Image, size: Sequence[int]) -> Image.Image:
    left, top = round((image.width - size[0]) / 2), round((image.height - size[1]) / 2)
    return image.crop((left, top, left + size[0], top + size[1]))
