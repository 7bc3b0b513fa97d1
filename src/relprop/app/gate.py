"""The gate: one computation at a time, a few that wait, and none that takes for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from relprop.app.limits import BusyError, LateError, Limits, StoppedError

__all__ = ["Gate", "Turn"]

T = TypeVar("T")
_LOOK = 0.1  # seconds between two looks at whether somebody still wants it


class Turn:
    """One visitor's request, from when it waits until it is done.

    Attributes:
        deadline: When it has to be done, by :func:`time.monotonic`; None until it begins.
        part: How much of it is done, from 0 to 1.
        doing: What is being done.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.deadline: float | None = None
        self.part, self.doing = 0.0, "waiting for its turn"
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends it: for the visitor at once, for the computation at the next :meth:`check`."""
        self._stopped.set()

    def begin(self) -> None:
        """The clock runs from here on, if it does not yet."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.limits.seconds
        self.check()

    def check(self) -> None:
        """Ends what was stopped, or takes too long, by raising.

        Raises:
            StoppedError: The visitor does not want it any more.
            LateError: Its time is over.
        """
        if self._stopped.is_set():
            raise StoppedError("Stopped, as you asked.")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise late(self.limits)

    def tell(self, part: float, doing: str) -> None:
        """How far it is; a `relprop.compare.Progress`."""
        self.part, self.doing = part, doing
        self.check()


class Gate:
    """Lets one computation in at a time, in the order in which they came, always on the same thread.

    Torch already uses all cores for one of them, and on one thread the memory that one has freed is there for the next.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._worker = ThreadPoolExecutor(1, "relprop")
        self._lock = threading.Lock()
        self._inside = 0

    def run(self, work: Callable[[], T], turn: Turn | None = None) -> T:
        """Computes something when its turn has come.

        Args:
            work: What to compute; where it takes long, it calls ``turn.check`` now and then.
            turn: The request that this is a part of; by default one of its own.

        Raises:
            BusyError: Too many are waiting.
            LateError: It took too long.
            StoppedError: The visitor has stopped it. What cannot be ended is left to end by itself, and counts until
                then.
        """
        turn = turn or Turn(self.limits)

        def inside() -> T:
            turn.begin()
            return work()

        with self._lock:
            if self._inside > self.limits.waiting:
                raise BusyError(
                    f"The server is busy, {self.limits.waiting} requests are waiting already; try again in a moment."
                )
            self._inside += 1
        future = self._worker.submit(inside)
        future.add_done_callback(self._leave)
        try:
            while not wait([future], _LOOK).done:
                turn.check()
            return future.result()
        except CancelledError as error:
            raise StoppedError("The server is closing.") from error
        finally:
            future.cancel()  # if it still waits, nobody waits for it any more

    @property
    def busy(self) -> bool:
        """Whether something is inside, or waits."""
        return self._inside > 0

    def _leave(self, _: Future[T]) -> None:
        with self._lock:
            self._inside -= 1

    def close(self) -> None:
        """Ends what waits; what is inside is left to end by itself."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def late(limits: Limits) -> LateError:
    """What one is told whose time is over."""
    return LateError(
        f"This took longer than the {limits.seconds:g} seconds that this server gives a request; ask for less at once, "
        "or for a smaller model."
    )
