"""The log of a run: what is done already, and what takes in the rest; the one writer of a study's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relprop.study.journal import Journal, Row
from relprop.study.outcome import Known, Outcome
from relprop.study.parts import Parts
from relprop.study.pieces import Batch, Piece
from relprop.study.progress import Progress, Tally
from relprop.study.runner import Runner
from relprop.study.troubles import Entry, Troubles

__all__ = ["Log"]

_RECALLED = 500_000
"""Rows of earlier runs that running means begin with; more would delay the first piece."""


class Log:
    """Takes in what comes of pieces, wherever they were worked on: each row counts once, by its key.

    Args:
        run: What knows the study's pieces.
        journal: The rows.
        parts: Where else the rows go, or None.
        total: Images of the study, or None.
        progress: Told of all that comes in.

    Attributes:
        known: The keys of rows that were there when it began.
        failures: What went wrong.
        notes: What does not apply.
    """

    def __init__(
        self,
        run: Runner,
        journal: Journal,
        parts: Parts | None,
        total: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._run, self._journal, self._parts, self._progress = run, journal, parts, progress
        self.known = Known(journal.keys())
        self.failures, self.notes = Troubles(), Troubles()
        self.notes.take(run.told()[1])  # what fits no method
        self._tally = Tally(total, run.wanted)
        self._recall = progress is not None and len(journal) <= _RECALLED
        self._silent = True

    def lacking(self, batch: Batch) -> list[Piece]:
        """The pieces of a batch that are not done."""
        pieces = []
        for group in range(len(self._run.groups)):
            piece = self._run.piece(batch, group)
            mark = self._journal.marked(piece.id)
            if mark is None:
                pieces.append(piece)
            else:
                self._take(*mark)
                self._tally.before += self._share(piece)
        if pieces and self._silent:
            self.tell()
        return pieces

    def rows(self, rows: Sequence[Row]) -> None:
        """Takes in some rows of a piece that is not done."""
        if rows:
            self._journal.add(rows)
            if self._parts is not None:
                self._parts.take(rows)
        # What was there is recalled with its piece, also where it was computed again for the company.
        self._tally.add(row for row in rows if row.key not in self.known)

    def add(self, piece: Piece, outcome: Outcome) -> None:
        """Takes in what came of a piece; one without failures is done."""
        self.rows(outcome.rows)
        fresh = bool(outcome.rows or outcome.failures) or any(k not in self.known for k in outcome.keys)
        if not outcome.failures and not piece.without:
            self._journal.mark(piece.id, outcome.keys, outcome.notes)
        self._take([k for k in outcome.keys if k in self.known], outcome.notes)
        self._journal.claim(outcome.keys)
        self.failures.take(outcome.failures)
        if fresh:
            self._tally.fresh += self._share(piece)
        else:
            self._tally.before += self._share(piece)
        if self._parts is not None:
            self._parts.done(piece.id)
        self.tell()

    def aside(self, piece: Piece, image: str, why: str) -> None:
        """Names an image that is set aside."""
        methods = ", ".join(method.name for method in self._run.groups[piece.group])
        self.failures.note(methods, why, image)

    def pace(self, workers: dict[str, float]) -> None:
        """Takes in how fast the workers are."""
        self._tally.workers = workers

    def tell(self, piece: Piece | None = None, part: float = 0.0) -> None:
        """Tells how far it is, with a part of a piece on its way."""
        self._silent = False
        if self._progress is not None:
            self._progress(self._tally.progress(0.0 if piece is None else part * self._share(piece)))

    def close(self) -> None:
        """Ends the run: what waits is written, and what was done before is told."""
        if self._parts is not None:
            self._parts.ship()
        if self._silent:
            self.tell()

    def fraction(self, piece: Piece) -> float:
        """Which part of the methods a piece has."""
        return len(self._run.groups[piece.group]) / len(self._run.named)

    def _share(self, piece: Piece) -> float:
        """A piece in images."""
        return len(piece.batch.samples) * self.fraction(piece)

    def _take(self, keys: Sequence[str], notes: Sequence[Entry]) -> None:
        self._journal.claim(keys)
        self.notes.take(notes)
        if self._recall:
            self._tally.add(self._journal.some(keys))
