"""Image files: found in folders, and read as the picture that a viewer would show."""

from __future__ import annotations

import io
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from relprop.errors import RelpropError
from relprop.quiet import quietly

__all__ = ["PHOTO", "SAMPLES", "SUFFIXES", "find", "names", "read", "rgb"]

PHOTO = Path(__file__).parent / "data" / "chelsea.jpg"
"""The bundled photo of a cat; ``data/README.md`` says whose it is."""

SAMPLES = {"cat": PHOTO, "coffee": PHOTO.with_name("coffee.jpg"), "rocket": PHOTO.with_name("rocket.jpg")}
"""All bundled photos."""

SUFFIXES = frozenset(
    (
        *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm"),
        *(".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
    )
)
"""What is taken for an image in a folder; a file that is named may be called anything."""

_MADE = tuple(map(frozenset, (("manifest.json", "relevance.npy"), ("manifest.json", "maps.npz"))))
# What a saved explanation always has, and what a comparison has.

# Far more than any network sees: from here on a JPEG is decoded at a half, a quarter or an eighth of its size.
_DRAFT_PIXELS = 32_000_000
_DRAFT_SIDE = 2048


def find(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The image files that paths stand for.

    A file stands for itself, whatever it is, and so does one that is not there: `read` says what is wrong with it. A
    folder stands for all images below it, in sorted order; hidden ones, links to folders and the pictures of saved
    explanations and comparisons are left out.

    Args:
        paths: Files and folders.

    Returns:
        The files, each once, in the order of the paths.

    Raises:
        RelpropError: There are none, or a path is empty.
    """
    given = list(paths)
    if "" in given:
        raise RelpropError("One of the images has an empty name.")
    files: dict[Path, Path] = {}
    for path in map(Path, given):
        # os.path says no where a Path would raise, and leaves links alone: those are names of their own.
        for file in _below(path) if os.path.isdir(path) else [path]:  # noqa: PTH112
            files.setdefault(Path(os.path.abspath(file)), file)  # noqa: PTH100
    if not files:
        where = ", ".join(map(str, given)) or "nowhere"
        raise RelpropError(f"There are no images in {where}; those end in {' '.join(sorted(SUFFIXES))}.")
    return list(files.values())


def read(
    path: str | os.PathLike[str], content: bytes | BinaryIO | None = None, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """The picture in a file, in RGB with 8 bits a colour.

    It is turned as its EXIF data says, put on white where it is transparent, and the first frame where there are
    several; 16 bits are scaled to 8.

    Args:
        path: The file.
        content: What is in it, where that was read already: the path is but a name then. Or the open file.
        formats: The kinds of files, as Pillow calls them; None for all that it knows.

    Raises:
        RelpropError: The file cannot be read as an image; with its name and what is wrong.
    """
    path = Path(path)
    try:
        if not (len(content) if isinstance(content, bytes) else _size(path)):
            raise RelpropError(f"{path} is empty.")
        with quietly():  # Pillow remarks on large images and odd metadata, and reads them
            source = io.BytesIO(content) if isinstance(content, bytes) else content or path
            with Image.open(source, formats=formats) as opened:
                if opened.width * opened.height > _DRAFT_PIXELS:
                    opened.draft(None, (_DRAFT_SIDE, _DRAFT_SIDE))
                opened.load()
                return rgb(opened, path)
    except RelpropError:
        raise
    except FileNotFoundError as error:
        missing = f"{path} is a link to nothing." if path.is_symlink() else f"There is no image {path}."
        raise RelpropError(missing) from error
    except UnidentifiedImageError as error:
        raise RelpropError(f"{path} is no image of a kind that can be read.") from error
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 1_000_000
        raise RelpropError(f"{path} has more than {most} million pixels, too many to be read; shrink it.") from error
    except MemoryError as error:
        raise RelpropError(f"{path} does not fit into memory; shrink it.") from error
    except Exception as error:  # damaged files end in errors of any kind
        reason = getattr(error, "strerror", None)  # the system's, not Pillow's: the file may be sound
        if reason:
            raise RelpropError(f"{path} cannot be read: {reason}.") from error
        raise RelpropError(f"{path} is damaged or cut short: {str(error).rstrip('.') or repr(error)}.") from error


def _size(path: Path) -> int:
    """Bytes of a file; refuses what is none."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        closed = not os.access(path, os.R_OK | os.X_OK)
        raise RelpropError(f"{path} is a folder {'that may not be looked into' if closed else 'and no image'}.")
    if not stat.S_ISREG(found.st_mode):
        raise RelpropError(f"{path} is no regular file.")
    return found.st_size


def names(paths: Sequence[Path]) -> list[str]:
    """A name for each of several files by which to call what is made of it, as short as tells them apart.

    ``cat`` for the only ``cat.jpg``, else ``cat.jpg``, else ``pets-cat``, else ``pets-cat.jpg``, and so on.
    """
    depth = max((len(path.absolute().parts) for path in paths), default=1)
    result = [""] * len(paths)
    for parents in range(depth - 1):
        for whole in (False, True):
            # Some file systems take Cat and cat for the same.
            count = Counter(name.casefold() for name in result)
            result = [
                name if name and count[name.casefold()] == 1 else _name(path, parents, whole)
                for name, path in zip(result, paths, strict=True)
            ]
    count = Counter(name.casefold() for name in result)
    return [f"{name}-{i}" if count[name.casefold()] > 1 else name for i, name in enumerate(result)]


def _name(path: Path, parents: int, whole: bool) -> str:
    """A file's name with those of some of the folders that it is in."""
    parts = [*path.absolute().parts[1:-1], path.name if whole else path.stem]
    return "-".join(parts[-parents - 1 :]).lstrip(".-") or "image"


def _below(folder: Path) -> list[Path]:
    """The images in a folder and below; a folder that is closed stands for itself, so that `read` says so."""
    files: list[Path] = []
    closed: list[Path] = []
    for where, folders, names in os.walk(folder, onerror=lambda error: closed.append(Path(error.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if not any(made.issubset(names) for made in _MADE):
            there = [Path(where, name) for name in names if not name.startswith(".")]
            files += [file for file in there if file.suffix.lower() in SUFFIXES]
    return sorted(files + closed)


def rgb(image: Image.Image, name: str | os.PathLike[str] = "The image") -> Image.Image:
    """A picture as a viewer would show it, in RGB with 8 bits a colour; as :func:`read` does it.

    Args:
        image: The picture.
        name: What to call it when it is refused.

    Raises:
        RelpropError: The range of its pixels is not known.
    """
    with suppress(Exception):  # damaged EXIF data, of a sound image
        image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise RelpropError(f"{name} has floating-point pixels, whose range is not known; save it with 8 or 16 bits.")
    if image.mode.startswith("I"):  # Pillow would clip 16 bits at 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise RelpropError(f"{name} has 32-bit pixels, whose range is not known; save it with 8 or 16 bits.")
        return Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        image = paper
    picture = image.convert("RGB")
    picture.info.clear()  # what was in the file has been applied, and must not be applied again
    return picture
