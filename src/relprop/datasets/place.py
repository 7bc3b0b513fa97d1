"""Places: where an image lies that is no file of this machine's, a URL or a stretch of a WebDataset shard."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relprop.errors import RelpropError, saying

__all__ = ["Place", "filesystem"]


@dataclass(frozen=True)
class Place:
    """Some bytes, read when they are asked for, by whoever asks.

    Attributes:
        url: A path, or a URL of any scheme that fsspec knows: ``https``, ``s3``, ``gs`` and others.
        start: The first byte, if it is a part of a larger file.
        size: How many bytes there are then.
    """

    url: str
    start: int | None = None
    size: int | None = None

    def __str__(self) -> str:
        return self.url if self.start is None else f"{self.url}:{self.start}+{self.size}"

    def read(self) -> bytes:
        """The bytes.

        Raises:
            RelpropError: If they cannot be had.
        """
        with saying(f"{self} cannot be read"):
            if "://" not in self.url:
                with Path(self.url).open("rb") as file:
                    file.seek(self.start or 0)
                    found = file.read() if self.size is None else file.read(self.size)
            else:
                files, path = filesystem(self.url)
                end = None if self.start is None or self.size is None else self.start + self.size
                found = files.cat_file(path, self.start, end)
        if self.size is not None and len(found) != self.size:
            raise RelpropError(f"{self} cannot be read: there are {len(found)} bytes of {self.size}.")
        return bytes(found)


def filesystem(url: str) -> tuple[Any, str]:
    """What reads and writes a URL, and what it calls it.

    Raises:
        RelpropError: If the scheme is unknown, or its package is missing.
    """
    try:
        # Torch brings it along, and few need it.
        files, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RelpropError(f"{url} cannot be reached: {str(error).rstrip('.')}.") from error
    return files, path
