"""The scheduler: hands pieces to workers, replaces those that die, and takes in what comes back."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from relprop.cluster.trials import Trials
from relprop.cluster.worker import Hello
from relprop.errors import RelpropError
from relprop.study.log import Log
from relprop.study.outcome import Outcome
from relprop.study.pieces import Batch, Piece

__all__ = ["UNREADY", "WAIT", "Hand", "Scheduler", "reason"]

DEPTH = 2
"""Pieces that a worker has: one that it works on, and one so that it need not wait. No more are ever on their way."""

STUMBLES, DEATHS = 5, 50
"""Workers that may raise an error when they start, or be dead before they have, until the study is given up."""

WAIT = 60.0
UNREADY = "No worker is ready yet; the cluster may have no room for one: see its dashboard, or ray status."
"""What is said whenever so many seconds have passed without one."""

_LOOK = 5.0


@dataclass(eq=False)
class Hand:
    """A worker, as the driver sees it.

    Attributes:
        name: What it is called.
        actor: Ray's handle.
        greeting: What it will say when it is ready.
        hello: What it said, or None.
        queue: The pieces that it has, the one that it works on first.
        images: What it has done, in images.
        seconds: How long that took.
    """

    name: str
    actor: Any
    greeting: Any
    hello: Hello | None = None
    queue: deque[tuple[Any, Piece]] = field(default_factory=deque)
    images: float = 0.0
    seconds: float = 0.0


class Scheduler:
    """Works a study off with the hands that there are.

    Args:
        hire: Makes a worker of a name.
        room: How many workers there should be.
        known: A reference to the keys of rows that are there.
        log: What takes in the rows.
        report: Told what a person should know.
        weights: A hash of the weights that workers should have.
        versions: Of relprop and torch, likewise.

    Attributes:
        deaths: Workers that died.
        seen: What workers said of themselves, by their names.
    """

    def __init__(
        self,
        hire: Callable[[str], Hand],
        room: Callable[[], int],
        known: Any,
        log: Log,
        report: Callable[[str], None],
        weights: str,
        versions: tuple[str, str],
    ) -> None:
        self._ray = importlib.import_module("ray")
        self._hire, self._room, self._known, self._log, self._report = hire, room, known, log, report
        self._weights, self._versions = weights, versions
        self._trials = Trials()
        self._hands: dict[str, Hand] = {}
        self._again: deque[Piece] = deque()
        self._hired = self._stumbles = self._stillborn = self.deaths = 0
        self.seen: dict[str, Hello] = {}
        self._looked, self._idle = -_LOOK, time.monotonic()

    def __call__(self, batches: Iterable[Batch]) -> None:
        """Works all pieces off that the log lacks.

        Raises:
            RelpropError: If no worker can be had.
        """
        todo = (piece for batch in batches for piece in self._log.lacking(batch))
        try:
            upcoming = self._next(todo)
            while upcoming or any(hand.queue for hand in self._hands.values()):
                if upcoming:
                    self._staff()
                for hand in self._hands.values():
                    while upcoming and hand.hello is not None and len(hand.queue) < DEPTH:
                        task = hand.actor.work.options(name=str(upcoming)).remote(upcoming, self._known)
                        hand.queue.append((task, upcoming))
                        upcoming = self._next(todo)
                self._wait()
                upcoming = upcoming or self._next(todo)
        finally:
            for hand in self._hands.values():
                self._ray.kill(hand.actor)

    def _next(self, todo: Iterator[Piece]) -> Piece | None:
        return self._again.popleft() if self._again else next(todo, None)

    def _staff(self) -> None:
        """Hires until there are as many as there is room for; nodes come and go."""
        if time.monotonic() - self._looked < _LOOK and self._hands:
            return
        self._looked = time.monotonic()
        while len(self._hands) < self._room():
            self._hired += 1
            hand = self._hire(f"worker-{self._hired}")
            self._hands[hand.name] = hand
        ready = any(hand.hello is not None for hand in self._hands.values())
        if ready:
            self._idle = self._looked
        elif self._looked - self._idle > WAIT:
            self._idle = self._looked
            self._report(UNREADY)

    def _wait(self) -> None:
        """Waits for a moment, or until something has happened."""
        # A worker takes its pieces in order, so the first is the one to wait for, and to blame.
        waiting = {hand.greeting if hand.hello is None else hand.queue[0][0]: hand for hand in self._busy()}
        if not waiting:
            time.sleep(0.2)
            return
        self._ray.wait([*waiting], num_returns=1, timeout=1.0)
        ready, _ = self._ray.wait([*waiting], num_returns=len(waiting), timeout=0)
        for ref in ready:
            hand = waiting[ref]
            if hand.hello is None:
                self._greet(hand)
            else:
                self._take(hand)

    def _busy(self) -> Iterator[Hand]:
        return (hand for hand in self._hands.values() if hand.hello is None or hand.queue)

    def _greet(self, hand: Hand) -> None:
        try:
            hello: Hello = self._ray.get(hand.greeting)
        except self._ray.exceptions.RayError as error:
            raised = isinstance(error, self._ray.exceptions.RayActorError) and error.actor_init_failed
            self._stumbles += raised
            self._stillborn += not raised
            self._dismiss(hand)
            if self._stumbles >= STUMBLES or self._stillborn >= DEATHS:
                raise RelpropError(f"No worker can start, the last one for this reason: {reason(error)}.") from error
            return
        if hello.versions != self._versions:
            raise RelpropError(
                f"{hello.place} has relprop {hello.versions[0]} and torch {hello.versions[1]}, the driver has "
                f"{self._versions[0]} and {self._versions[1]}; install the same ones everywhere."
            )
        if hello.weights != self._weights:
            raise RelpropError(f"The weights that reached {hello.place} are not the driver's; start the study again.")
        self._stumbles = self._stillborn = 0
        hand.hello = self.seen[hand.name] = hello

    def _take(self, hand: Hand) -> None:
        """Takes in what came of the piece that a worker was at."""
        task, piece = hand.queue[0]
        try:
            outcome: Outcome = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:  # it lives; the piece went wrong as a whole
            hand.queue.popleft()
            self._settle(self._trials.blame(piece, reason(error)))
        except self._ray.exceptions.RayError as error:
            self._bury(hand, error)
        else:
            hand.queue.popleft()
            if self._trials.alone(piece) is not None:
                self._settle(self._trials.acquit(piece))
                return
            hand.images += len(piece.samples) * self._log.fraction(piece)
            hand.seconds += outcome.seconds
            self._log.pace({h.name: h.images / h.seconds for h in self._hands.values() if h.seconds})
            self._log.add(piece, outcome)

    def _bury(self, hand: Hand, error: Exception) -> None:
        """A worker is dead: what it worked on is done again, and counts against that unless the whole node is gone."""
        self.deaths += 1
        self._dismiss(hand)
        if not hand.queue:
            return
        (_, first), *rest = hand.queue
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        lost = hand.hello is None or hand.hello.node not in alive
        self._settle([piece for _, piece in rest])
        self._settle([first] if lost else self._trials.blame(first, reason(error)))

    def _dismiss(self, hand: Hand) -> None:
        self._hands.pop(hand.name, None)
        self._looked = -_LOOK
        self._ray.kill(hand.actor)

    def _settle(self, pieces: Iterable[Piece]) -> None:
        self._again.extendleft(reversed(list(pieces)))
        for piece, image, why in self._trials.aside:
            self._log.aside(piece, image, why)
        self._trials.aside.clear()


def reason(error: BaseException) -> str:
    """What Ray says, in short."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RelpropError):
        return str(cause).rstrip(".")
    if cause is not None:
        return f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}".rstrip(".: ")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False):
        return lines[-1].rstrip(".")  # of the traceback
    cause = next((line for line in lines if "out of memory" in line.lower() or "died" in line or "exit" in line), None)
    return (cause or next(iter(lines), type(error).__name__)).rstrip(".")
