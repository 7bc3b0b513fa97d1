"""The local run: one pass over the pieces of a study, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from relprop.study.loading import Loaded, load
from relprop.study.log import Log
from relprop.study.outcome import Outcome
from relprop.study.pieces import Batch, Piece
from relprop.study.runner import Runner

__all__ = ["Local"]

_AHEAD = 2


@dataclass(frozen=True)
class Local:
    """Works on pieces here, one after another; the next images are read meanwhile."""

    def __call__(self, run: Runner, batches: Iterable[Batch], log: Log) -> None:
        """Does what the log lacks.

        Args:
            run: What explains and measures.
            batches: The study.
            log: What is done already, and what takes in the rest.
        """
        for pieces, loaded in self._loaded(run, batches, log):
            for piece in pieces:
                keys = run.of(loaded, piece.group)
                every = [k for some in keys.values() for k in some.values()]
                fresh = False
                for part, rows in run.measure(loaded, keys, log.known):
                    fresh = True
                    if part < 1:
                        log.rows(rows)
                        log.tell(piece, part)
                    else:
                        log.add(piece, Outcome(every, rows, *run.told(), 0.0))
                if not fresh:
                    log.add(piece, Outcome(every, [], *run.told(), 0.0))

    def about(self) -> dict[str, Any]:
        """Nothing that a manifest does not tell already."""
        return {}

    @staticmethod
    def _loaded(run: Runner, batches: Iterable[Batch], log: Log) -> Iterator[tuple[list[Piece], Loaded]]:
        """The pieces that are to be done, batch by batch, with their images."""
        pending: deque[tuple[list[Piece], Future[Loaded]]] = deque()
        todo = (pieces for batch in batches if (pieces := log.lacking(batch)))
        pool = ThreadPoolExecutor(1, thread_name_prefix="relprop-ahead")
        try:
            while True:
                while len(pending) <= _AHEAD and (pieces := next(todo, [])):
                    pending.append((pieces, pool.submit(load, run.model, pieces[0].samples)))
                if not pending:
                    return
                pieces, future = pending.popleft()
                yield pieces, future.result()
        finally:  # also when whoever asked stops asking
            pool.shutdown(wait=False, cancel_futures=True)
