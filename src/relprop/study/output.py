"""The output of a study: a folder, or a URL with a folder of this machine's behind it, or nothing."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from relprop import cache
from relprop.study import journal as journals
from relprop.study import parts
from relprop.study.journal import Journal, Row

__all__ = ["Output", "read"]


@dataclass(frozen=True)
class Output:
    """Where a study is kept.

    Attributes:
        folder: The folder of its journal and manifest; None for a study that is kept nowhere.
        url: Where its rows go in parts, or None.
    """

    folder: Path | None
    url: str | None = None

    @classmethod
    def at(cls, out: str | os.PathLike[str] | None) -> Output:
        """What a path or a URL stands for; a URL's journal is in the cache, by its name."""
        if out is None or "://" not in os.fspath(out):
            return cls(None if out is None else Path(out))
        url = os.fspath(out)
        name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
        return cls(cache.folder() / "studies" / name, url)

    def journal(self) -> Journal:
        """The journal; where it is gone and its product is there, as in a folder of results, that is continued."""
        if self.folder is None:
            return Journal(Path(":memory:"))
        made = Journal(self.folder / journals.JOURNAL)
        # One without rows may be of a run that was killed before it had taken in the product.
        if (self.folder / journals.PRODUCT).exists() and next(made.keys(), None) is None:
            made.add(journals.product(self.folder))
        return made


def read(out: str | os.PathLike[str], *, curves: bool = True) -> list[Row]:
    """The rows of a study in a folder or at a URL.

    Args:
        out: The folder, or the URL.
        curves: Whether they come with their curves, which are most of what they hold.

    Raises:
        RelpropError: If there are none.
    """
    if "://" in os.fspath(out):
        return parts.fetch(os.fspath(out), curves=curves)
    return journals.read(Path(out), curves=curves)
