"""The cache of weights: a file is there in one piece or not at all, and vouches for itself.

It carries the beginning of its own SHA-256 in its name, as in ``resnet50-keras-0123456789abcdef.safetensors``: what was
cut short or changed is noticed and fetched anew. One process fetches at a time, in a ``.partial`` folder that the next
one removes should this one be killed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from relprop.errors import RelpropError
from relprop.fetching import Report, quiet
from relprop.weights import WeightsFile, read, serialised, sha256_of

__all__ = ["Made", "cached", "fetch", "folder", "holds"]

Made: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""Tensors by name, and what is to be known of them."""

_DIGITS = 16


def folder() -> Path:
    """The cache: ``RELPROP_CACHE``, else ``relprop`` in ``XDG_CACHE_HOME``, else ``~/.cache/relprop``."""
    if own := os.environ.get("RELPROP_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "relprop"


def holds(key: str) -> bool:
    """Whether weights are in the cache under a key, going by names alone."""
    return any(folder().glob(f"{key}-{'?' * _DIGITS}.safetensors"))


def cached(key: str, report: Report = quiet) -> WeightsFile | None:
    """The weights in the cache under a key, if they are there and whole; what is not whole is removed."""
    for path in sorted(folder().glob(f"{key}-*.safetensors")):
        name = re.fullmatch(rf"{re.escape(key)}-([0-9a-f]{{{_DIGITS}}})", path.stem)
        if name is None:
            continue
        with suppress(OSError):
            if sha256_of(path).startswith(name[1]):
                return read(path)
            report(f"{path} is damaged and is left out.")
            path.unlink()
    return None


def fetch(key: str, make: Callable[[Path], Made], report: Report = quiet) -> WeightsFile:
    """The weights in the cache under a key, made first if they are not there.

    Args:
        key: Name of the weights in the cache.
        make: Fetches and converts them, in a folder that is removed afterwards.
        report: Told when a damaged file is left out, or another process waited for.

    Raises:
        UnavailableError: They could not be fetched.
        RelpropError: They could not be kept.
    """
    home = folder()
    if found := cached(key, report):  # without a turn, so that a cache may be read-only
        return found
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _turn(home, report) as alone:
            if found := cached(key, report):
                return found
            for stale in home.glob("*.partial") if alone else ():
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(".partial", f"{key}-", home, ignore_cleanup_errors=True) as work:
                return _keep(home, key, Path(work), *make(Path(work)))
    except OSError as error:
        raise RelpropError(
            f"The weights cannot be kept in {home}: {error.strerror or error}; make room there, or set RELPROP_CACHE "
            "to a folder that can be written."
        ) from error


def _keep(home: Path, key: str, work: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> WeightsFile:
    data = serialised(tensors, about)
    sha256 = hashlib.sha256(data).hexdigest()
    (work / "whole").write_bytes(data)
    path = home / f"{key}-{sha256[:_DIGITS]}.safetensors"
    (work / "whole").replace(path)
    return WeightsFile(path, sha256, about, tensors)


@contextmanager
def _turn(home: Path, report: Report) -> Iterator[bool]:
    """Waits until no other process is fetching; False where that cannot be known.

    The system ends a turn together with its process, however that dies.
    """
    with (home / ".lock").open("a") as file:
        alone = False
        if sys.platform != "win32":
            import fcntl  # noqa: PLC0415 - not there on Windows

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                report(f"Another process is fetching weights into {home}; waiting for it.")
                fcntl.flock(file, fcntl.LOCK_EX)
                alone = True
            except OSError:  # a file system without locks: at worst two processes fetch the same
                pass
        yield alone
