"""Limits: what a server takes from a stranger, and photos read under them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from relprop import images
from relprop.errors import RelpropError
from relprop.quiet import quietly

__all__ = ["FORMATS", "BusyError", "LateError", "Limits", "StoppedError", "TooLargeError", "called", "read_photo"]

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""What is decoded. Pillow knows more, some of it by way of other programs, such as PostScript."""

MEGA = 1_000_000


class TooLargeError(RelpropError):
    """More was sent than is taken."""


class BusyError(RelpropError):
    """There are too many others."""


class LateError(RelpropError):
    """It took too long."""


class StoppedError(RelpropError):
    """The visitor has stopped it."""


@dataclass(frozen=True)
class Limits:
    """What a server takes and does at most.

    Attributes:
        photo: Bytes of a photo's file.
        pixels: Pixels of a photo.
        checkpoint: Bytes of a visitor's own weights; 0 takes none.
        waiting: Requests that may wait for their turn.
        seconds: Time that one request may compute.
        visits: Visitors whose results are kept.
        idle: Seconds without a request after which a visit is over.
    """

    photo: int = 20 * MEGA
    pixels: int = 50 * MEGA
    checkpoint: int = 300 * MEGA
    waiting: int = 16
    seconds: float = 300.0
    visits: int = 50
    idle: float = 1800.0

    @property
    def upload(self) -> int:
        """Bytes of any one file."""
        return max(self.photo, self.checkpoint)

    def check_size(self, name: str, size: int, most: int) -> None:
        """Refuses a file that is too large.

        Raises:
            TooLargeError: It is.
        """
        if size > most:
            raise TooLargeError(
                f"{name} has {size / MEGA:.1f} MB and this server takes {most / MEGA:g} at most; shrink it."
            )


def called(name: str | None) -> str:
    """A visitor's name for a file, as far as it can be shown, saved and sent: one line without folders."""
    last = re.split(r"[/\\]", name or "")[-1]
    return "".join(c for c in last if c.isprintable())[:100].strip(" .") or "image"


class _Watched(io.FileIO):
    """A file with somebody who looks on while it is read: a JPEG of many scans takes a decoder very long."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        super().__init__(path)
        self._check = check

    def read(self, size: int | None = -1) -> bytes:
        self._check()
        return super().read(size)


def read_photo(path: Path, name: str, limits: Limits, check: Callable[[], None] = lambda: None) -> Image.Image:
    """The picture in a visitor's file.

    Nothing is decoded before the file's size, kind and number of pixels are known to be fine.

    Args:
        path: Where the file lies.
        name: What the visitor calls it.
        limits: Those of the server.
        check: Called now and then while the file is decoded; ends that by raising a RelpropError.

    Raises:
        RelpropError: It cannot be taken; in a sentence without the server's paths.
    """
    try:
        limits.check_size(name, path.stat().st_size, limits.photo)
        with _Watched(path, check) as file:
            # Pillow remarks on large images, which are refused below.
            with quietly(), Image.open(file, formats=FORMATS) as header:
                width, height = header.size
            if width * height > limits.pixels:
                raise TooLargeError(
                    f"{name} has {width} x {height} pixels and this server takes {limits.pixels / MEGA:g} million at "
                    "most; shrink it."
                )
            # By the same kinds again: a file that is two at once must not be checked as one and decoded as the other.
            return images.read(path, file, FORMATS)
    except (TooLargeError, LateError, StoppedError):
        raise
    except RelpropError as error:
        raise RelpropError(str(error).replace(str(path), name)) from error
    except FileNotFoundError as error:
        raise RelpropError(f"{name} is not here any more; choose it again.") from error
    except Image.DecompressionBombError as error:
        raise TooLargeError(
            f"{name} has far more pixels than the {limits.pixels / MEGA:g} million that this server takes; shrink it."
        ) from error
    except Exception as error:  # damaged files end in errors of any kind
        raise RelpropError(f"{name} is no image of a kind that can be read; choose a JPEG or a PNG.") from error
