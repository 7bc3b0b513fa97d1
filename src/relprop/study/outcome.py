"""An outcome: what came of a piece, wherever it was worked on."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relprop.study.journal import Row
from relprop.study.troubles import Entry

__all__ = ["Known", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What came of a piece.

    Attributes:
        keys: Those of all rows that were asked for.
        rows: Those that were computed.
        failures: What went wrong; a piece with any is tried again by the next run.
        notes: What does not apply.
        seconds: How long it took.
    """

    keys: list[str]
    rows: list[Row] = field(repr=False)
    failures: list[Entry]
    notes: list[Entry]
    seconds: float


class Known(Container[str]):
    """The keys of rows that are there, in eight bytes each: all workers look into the same ones.

    Args:
        keys: The keys.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        found: NDArray[np.uint64] = np.fromiter((_number(k) for k in keys), np.uint64)
        found.sort()
        self._found = found

    def __contains__(self, name: object) -> bool:
        number = np.uint64(_number(str(name)))
        at = int(np.searchsorted(self._found, number))
        return at < len(self._found) and bool(self._found[at] == number)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
