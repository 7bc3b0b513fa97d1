"""Visits: what a server keeps of each visitor, in memory and in a folder, until they leave."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from relprop.app.limits import Limits
from relprop.app.shelf import Wanted
from relprop.errors import RelpropError

if TYPE_CHECKING:
    from relprop.app.answer import Answer
    from relprop.app.gate import Turn
    from relprop.compare import Comparison

__all__ = ["House", "Visit", "Visits"]

_PREFIX = "relprop-serve-"


class House:
    """A server's own folder: nothing is served from elsewhere, and nothing stays when the server ends.

    Attributes:
        folder: All of it.
        uploads: What visitors have sent; a visitor who knows a file's name may see it.
        visits: A folder for each visit, which nobody is shown.
    """

    def __init__(self) -> None:
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        self.uploads, self.visits = self.folder / "uploads", self.folder / "visits"
        self.uploads.mkdir()
        self.visits.mkdir()
        self._lock = _locked(self.folder)

    def holds(self, path: str | os.PathLike[str]) -> Path | None:
        """The file that a path leads to, links followed, if it is one of the uploads."""
        with suppress(OSError, ValueError):
            found = Path(path).resolve(strict=True)
            if found.is_file() and found.is_relative_to(self.uploads):
                return found
        return None

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _locked(folder: Path) -> TextIO | None:
    """A lock that lasts as long as its process; None where somebody has it."""
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _sweep() -> None:
    """Removes the folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            old = (folder / ".lock").exists()  # a younger one is being made
            if ours and old and (lock := _locked(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()


class Visit:
    """What there is of one visitor.

    Attributes:
        token: What leads to the results; nobody else can guess it.
        folder: For the visitor's files.
        photo: The photo, and what the visitor calls it.
        checkpoint: The visitor's own weights.
        answer: What was computed last.
        comparison: Of methods on the same photo.
        turn: What is being computed.
    """

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_urlsafe(24)
        self.folder = folder / self.token
        self.folder.mkdir()
        self.photo: tuple[Path, str] | None = None
        self.checkpoint: Path | None = None
        self.answer: Answer | None = None
        self.comparison: Comparison | None = None
        self.turn: Turn | None = None
        self.seen = time.monotonic()
        self._sent: set[Path] = set()

    def keep(self, upload: Path, suffix: str = "") -> Path:
        """Takes an upload over, by a name that is not the visitor's choice."""
        to = self.folder / f"{secrets.token_hex(4)}{suffix}"
        os.link(upload, to)  # no copy, and it stays if another visit that sent the same file ends
        self._sent.add(upload)
        return to

    def wants(self, model: Any, weights: Any) -> Wanted:
        """The model that the visitor chose, with the visitor's own weights where there are any."""
        return Wanted(model and str(model), weights and str(weights), self.checkpoint, self.token)

    def close(self) -> None:
        """Stops what is being computed and removes what was sent."""
        if self.turn is not None:
            self.turn.stop()
        for upload in self._sent:
            shutil.rmtree(upload.parent, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.answer = self.comparison = None


class Visits:
    """Everybody who is here.

    Args:
        folder: For the visits' folders.
        limits: How many visits, and for how long.
        forget: Told the token of a visit that is over.
    """

    def __init__(self, folder: Path, limits: Limits, forget: Callable[[str], None] = lambda _: None) -> None:
        self._folder, self._limits, self._forget = folder, limits, forget
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many are here."""
        return len(self._visits)

    def of(self, session: str) -> Visit:
        """The visit of a session, which begins with the first request."""
        with self._lock:
            if session not in self._visits:
                self._visits[session] = Visit(self._folder)
            visit = self._visits[session]
            visit.seen = time.monotonic()
            self._visits.move_to_end(session)
        self.sweep()
        return visit

    def find(self, token: str) -> Visit:
        """The visit that a token leads to.

        Raises:
            RelpropError: It is over.
        """
        for visit in list(self._visits.values()):
            if secrets.compare_digest(visit.token.encode(), token.encode()):
                visit.seen = time.monotonic()
                return visit
        raise RelpropError("This visit is over; explain the photo again.")

    def sweep(self) -> None:
        """Ends visits that are idle, or too many."""
        idle = time.monotonic() - self._limits.idle
        with self._lock:
            many = len(self._visits) - self._limits.visits
            over = [session for i, (session, v) in enumerate(self._visits.items()) if i < many or v.seen < idle]
        for session in over:
            self.end(session)

    def end(self, session: str) -> None:
        """Ends one visit; nothing of it stays."""
        with self._lock:
            visit = self._visits.pop(session, None)
        if visit is not None:
            visit.close()
            self._forget(visit.token)

    def close(self) -> None:
        """Ends all."""
        for session in list(self._visits):
            self.end(session)
