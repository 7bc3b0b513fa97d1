"""Classes: their names, and what a person may call them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from relprop.compat import import_torchvision
from relprop.errors import RelpropError


def imagenet_names() -> tuple[str, ...]:
    """The names of ImageNet's classes, torchvision's."""
    return tuple(import_torchvision().models.ResNet50_Weights.IMAGENET1K_V1.meta["categories"])


def imagenet_synsets() -> tuple[str, ...]:
    """The WordNet synsets of ImageNet's classes."""
    text = resources.files("relprop").joinpath("data/imagenet-synsets.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if not line.startswith("#"))


def read(classes: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    """Class names, as they are or from a text file with one a line.

    Raises:
        RelpropError: The file cannot be read, or has an empty line.
    """
    if not isinstance(classes, str | os.PathLike):
        return tuple(str(name) for name in classes)
    path = Path(classes).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RelpropError(f"The class names in {path} cannot be read: {reason}.") from error
    if not all(lines) or not lines:
        raise RelpropError(f"The class names in {path} are one a line, and line {[*lines, ''].index('') + 1} is empty.")
    return tuple(lines)


def matches(text: str, classes: Sequence[str]) -> list[int]:
    """The classes that a text may mean, by the strictest reading under which there are any."""
    words = [_words(name) for name in classes]
    wanted = _words(text)
    if not wanted:
        return []

    def pick(fits: Callable[[int], bool]) -> list[int]:
        return [index for index in range(len(classes)) if fits(index)]

    within = pick(lambda i: bool(words[i]) and set(words[i]) <= set(wanted))  # "tabby cat" for "tabby"
    longest = max((len(words[i]) for i in within), default=0)
    return (
        pick(lambda i: classes[i] == text)  # a Cardigan is a dog, a cardigan is not
        or pick(lambda i: words[i] == wanted)
        or pick(lambda i: set(wanted) <= set(words[i]))
        or pick(lambda i: " ".join(wanted) in " ".join(words[i]))
        or [i for i in within if len(words[i]) == longest]
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def nearest(text: str, there: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence that names what was perhaps meant."""
    by_lower = {name.lower(): prefix + name for name in there}
    near = [by_lower[name] for name in get_close_matches(text.lower(), by_lower, 3, 0.5)]
    return f"; the nearest are {', '.join(near)}" if near else ""
