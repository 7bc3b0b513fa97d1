"""Troubles: what went wrong in a study, or could not be, put together where it is the same."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from relprop.errors import RelpropError

__all__ = ["Entry", "Troubles", "sentence"]

Entry: TypeAlias = tuple[str, str, str | None]
"""Whom it is about, the sentence, and the image or None."""


class Troubles:
    """Sentences, each with whom and which images it is about."""

    def __init__(self) -> None:
        self._images: dict[tuple[str, str], dict[str, None]] = {}  # sets that keep their order

    def note(self, who: str, why: str, image: str | None = None) -> None:
        """Notes a sentence.

        Args:
            who: A method or a metric; nothing where it is about an image alone.
            why: The sentence.
            image: The name of an image.
        """
        images = self._images.setdefault((who, why), {})
        if image is not None:
            images[image] = None

    def entries(self) -> list[Entry]:
        """All that was noted, to be noted elsewhere."""
        return [(who, why, image) for (who, why), images in self._images.items() for image in images or [None]]

    def take(self, entries: Iterable[Entry]) -> None:
        """Notes what was noted elsewhere."""
        for entry in entries:
            self.note(*entry)

    def sentences(self) -> dict[str, str]:
        """The sentences, by whom they are about and with which images."""
        return {_about(who, list(images)): why for (who, why), images in self._images.items()}


def _about(who: str, images: list[str]) -> str:
    others = f" and {len(images) - 1} other{'s' if len(images) > 2 else ''}" if len(images) > 1 else ""
    return " on ".join(part for part in (who, *images[:1]) if part) + others


def sentence(error: Exception) -> str:
    """What an error has to say; where it was unexpected, with the place it came from."""
    if isinstance(error, RelpropError):
        return str(error)
    first = next(iter(str(error).splitlines()), "").rstrip(".") or "no reason given"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"Something unexpected, {type(error).__name__}: {first}{where}."
