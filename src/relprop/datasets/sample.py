"""Samples and datasets: labelled images, and where in them the objects are."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from relprop import images
from relprop.datasets.geometry import Box, to_crop
from relprop.datasets.place import Place
from relprop.datasets.tables import read_xml
from relprop.errors import RelpropError
from relprop.preparation import Preparation

__all__ = ["Dataset", "Point", "Sample"]

Point: TypeAlias = tuple[float, float]
"""x and y in pixels of the image file."""

_ORIENTATION = 0x0112  # the EXIF tag
_THRESHOLD = 127  # masks drawn by several people hold how many of them agree
_TRIMAP_OBJECT = 1


@dataclass(frozen=True)
class Sample:
    """An image and what is known of it; nothing is read before it is asked for.

    Attributes:
        path: The image file.
        label: Its class, or None.
        name: What it is called in its dataset.
        box_source: Its boxes, or an annotation in ILSVRC's XML to read them from.
        mask_path: An image of where the object is, or None.
        trimap: Whether that is 1 on the object, 2 beside it and 3 between, as in Oxford's pets; else bright on it.
        parts: Points on visible parts of the object, by name.
        place: Where the image lies, if it is no file of this machine's; the path is but a name then.
    """

    path: Path
    label: int | None
    name: str
    box_source: tuple[Box, ...] | Path = ()
    mask_path: Path | None = None
    trimap: bool = False
    parts: Mapping[str, Point] = field(default_factory=dict, hash=False)
    place: Place | None = None

    @cached_property
    def key(self) -> str:
        """The SHA-256 of the image file."""
        return hashlib.sha256(self.content()).hexdigest()

    @property
    def stamp(self) -> str:
        """What tells cheaply whether anything has changed: paths with sizes and times, places, boxes."""
        boxes = _stamp(self.box_source) if isinstance(self.box_source, Path) else str(self.box_source)
        mask = "" if self.mask_path is None else _stamp(self.mask_path)
        return " ".join([_stamp(self.path) if self.place is None else str(self.place), boxes, mask, str(self.trimap)])

    def content(self) -> bytes:
        """The bytes of the image file.

        Raises:
            RelpropError: If they cannot be read.
        """
        if self.place is not None:
            return self.place.read()
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise RelpropError(f"{self.path} cannot be read: {error.strerror}.") from error

    def picture(self) -> Image.Image:
        """The image; where it comes from afar, it is fetched once for this and its key.

        Raises:
            RelpropError: If it cannot be read.
        """
        if self.place is None:
            return images.read(self.path)
        content = self.content()
        self.__dict__.setdefault("key", hashlib.sha256(content).hexdigest())  # as cached_property keeps it
        return images.read(str(self.place), content)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Boxes around the objects, in pixels of the image file; x1 and y1 are the first outside."""
        return read_xml(self.box_source) if isinstance(self.box_source, Path) else self.box_source

    def mask(self) -> Tensor | None:
        """Where the object is in the image file, ``(H, W)``, or None; the border of a trimap is not the object's.

        Raises:
            RelpropError: If the mask cannot be read.
        """
        if self.mask_path is None:
            return None
        try:
            with Image.open(self.mask_path) as opened:
                values = np.array(opened if opened.mode in ("L", "P", "1", "I;16") else opened.convert("L"))
        except Exception as error:  # damaged files end in errors of any kind
            raise RelpropError(f"The mask {self.mask_path} cannot be read: {error}.") from error
        return torch.from_numpy(values == _TRIMAP_OBJECT if self.trimap else values > _THRESHOLD)

    def objects(self, preparation: Preparation | None = None) -> Tensor | None:
        """Where the objects are in what the model sees, ``(crop, crop)``: the mask, else the boxes; None without both.

        Args:
            preparation: How the model wants its images, by default resized to 256 and cropped to 224.

        Raises:
            RelpropError: If the image or its annotation cannot be read.
        """
        preparation = preparation or Preparation()
        size, orientation = self._stored()
        mask = self.mask()
        if mask is not None:
            if tuple(mask.shape) != size[::-1]:
                raise RelpropError(
                    f"The mask {self.mask_path} is {mask.shape[1]} x {mask.shape[0]}, but {self.path.name} is "
                    f"{size[0]} x {size[1]}."
                )
            return to_crop(mask, size, preparation, orientation)
        if not self.boxes:
            return None
        inside = torch.zeros(preparation.crop, preparation.crop, dtype=torch.bool)
        for x0, y0, x1, y1 in to_crop(torch.tensor(self.boxes), size, preparation, orientation).round().int().tolist():
            inside[y0:y1, x0:x1] = True
        return inside

    def _stored(self) -> tuple[tuple[int, int], int]:
        """Width and height of the pixels in the file, and how EXIF says that they are to be turned."""
        try:
            with Image.open(self.path if self.place is None else io.BytesIO(self.content())) as opened:
                return opened.size, int(opened.getexif().get(_ORIENTATION, 1))
        except OSError as error:
            raise RelpropError(f"{self.path} cannot be read as an image: {error}.") from error


@dataclass(frozen=True)
class Dataset:
    """Samples, in order.

    Attributes:
        name: What it is called.
        root: The folder that it was found in.
        layout: What that was taken for, in words.
        samples: The samples.
        classes: The names of its classes, where it has names of its own.
    """

    name: str
    root: Path
    layout: str
    samples: tuple[Sample, ...] = field(repr=False)
    classes: tuple[str, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __str__(self) -> str:
        counts = {
            "classes": len({s.label for s in self if s.label is not None}),
            "with boxes": len([s for s in self if s.box_source]),
            "with masks": len([s for s in self if s.mask_path]),
        }
        known = [f"{count} {what}" for what, count in counts.items() if count]
        return ", ".join([f"{self.name}: {len(self)} images, {self.layout}", *known])

    def sample(self, n: int, seed: int = 0) -> Dataset:
        """As many images of every class.

        Which ones depends on the seed and their names alone, so another class or image changes no other's turn.

        Args:
            n: How many of each class.
            seed: Another seed chooses others.

        Returns:
            The chosen ones, in the order of this dataset.

        Raises:
            RelpropError: If a class has fewer.
        """
        ranks = self._ranks(seed)
        sizes: dict[int | None, int] = {}
        for sample in self:
            sizes[sample.label] = sizes.get(sample.label, 0) + 1
        fewest = min(sizes, key=sizes.__getitem__)
        if not 0 < n <= sizes[fewest]:
            raise RelpropError(
                f"{self.name} cannot give {n} images of every class: class {fewest} has {sizes[fewest]}."
            )
        return replace(self, samples=tuple(s for s in self if ranks[s.name] < n))

    def first(self, n: int = 1) -> Dataset:
        """The first images of every class, by name; all of a class that has fewer."""
        counts: dict[int | None, int] = {}
        chosen = set()
        for sample in sorted(self, key=lambda s: s.name):
            counts[sample.label] = counts.get(sample.label, 0) + 1
            if counts[sample.label] <= n:
                chosen.add(sample.name)
        return replace(self, samples=tuple(s for s in self if s.name in chosen))

    def limit(self, total: int, seed: int = 0) -> Dataset:
        """At most so many images, spread over the classes as evenly as can be; all of them if there are not more."""
        if total < 1:
            raise RelpropError(f"A dataset cannot be limited to {total} images.")
        ranks = self._ranks(seed)
        turns = sorted(self, key=lambda s: (ranks[s.name], _lot(seed, str(s.label))))
        chosen = {s.name for s in turns[:total]}
        return replace(self, samples=tuple(s for s in self if s.name in chosen))

    def _ranks(self, seed: int) -> dict[str, int]:
        """Each sample's turn within its class, drawn by lot."""
        counts: dict[int | None, int] = {}
        ranks: dict[str, int] = {}
        for sample in sorted(self, key=lambda s: _lot(seed, s.name)):
            ranks[sample.name] = counts.get(sample.label, 0)
            counts[sample.label] = ranks[sample.name] + 1
        return ranks


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:  # seen by others only, or by nobody
        return str(path)
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def _lot(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()
