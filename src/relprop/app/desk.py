"""The desk: what the page and the JSON interface share, from a visitor's file to an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from relprop.app.answer import Answer, Question, answer
from relprop.app.bundle import bundle
from relprop.app.gate import Gate, Turn
from relprop.app.limits import Limits, read_photo
from relprop.app.report import report
from relprop.app.shelf import Shelf, Wanted
from relprop.app.visits import House, Visit, Visits
from relprop.compare import Comparison, compare
from relprop.errors import RelpropError
from relprop.zoo import Model

__all__ = ["Desk"]

T = TypeVar("T")


class Desk:
    """Where a server's work is done, one piece at a time.

    Args:
        models: Those that the server was started with.
        limits: What it takes and does at most.
    """

    def __init__(self, models: Sequence[Model], limits: Limits) -> None:
        self.limits = limits
        self.house = House()
        self.gate = Gate(limits)
        self.shelf = Shelf(models)
        self.visits = Visits(self.house.visits, limits, self.shelf.forget)

    def ask(
        self, photo: Path, name: str, wanted: Wanted, question: Question, then: Callable[[Answer], T], turn: Turn
    ) -> T:
        """Explains a photo, and makes something of the answer in the same turn.

        Raises:
            RelpropError: It cannot be read or explained, or there is no time for it.
        """

        def work() -> T:
            model = self.shelf.get(wanted)
            return then(answer(model, read_photo(photo, name, self.limits, turn.check), name, question))

        return self.gate.run(work, turn)

    def compare(self, visit: Visit, wanted: Wanted, methods: Sequence[str], points: int | None) -> Iterator[None]:
        """Compares methods on the photo that was explained last, one after another, so that others get their turn.

        After each step, ``visit.comparison`` has one method more. What was compared stays if the rest is stopped.

        Raises:
            RelpropError: There is nothing to compare, it was stopped or there is no time for it.
        """
        given, photo = visit.answer, visit.photo
        if given is None or photo is None:
            raise RelpropError("There is no photo yet; explain one first.")
        if not methods:
            raise RelpropError("No method is chosen; choose at least one.")
        turn = visit.turn = Turn(self.limits)
        visit.comparison = None
        for number, method in enumerate(methods):

            def tell(part: float, doing: str, before: int = number) -> None:
                turn.tell((before + part) / len(methods), doing)

            def one(method: str = method) -> Comparison:
                model = self.shelf.get(wanted)
                x = model.prepare(read_photo(*photo, self.limits, turn.check))[None]
                return compare(model, x, [method], int(given.explanation.target[0]), points=points, progress=tell)

            visit.comparison = _joined(visit.comparison, self.gate.run(one, turn))
            yield

    def report(self, visit: Visit) -> str:
        """The report of what was explained last.

        Raises:
            RelpropError: There is nothing yet.
        """
        given = _given(visit)
        return self.gate.run(lambda: report(given, visit.comparison))

    def bundle(self, visit: Visit) -> bytes:
        """The bundle of what was explained last.

        Raises:
            RelpropError: There is nothing yet.
        """
        given = _given(visit)
        return self.gate.run(lambda: bundle(given, visit.folder))

    def close(self) -> None:
        """Nothing stays."""
        self.gate.close()
        self.visits.close()
        self.house.close()


def _given(visit: Visit) -> Answer:
    if visit.answer is None:
        raise RelpropError("There is nothing to take away yet; explain a photo first.")
    return visit.answer


def _joined(before: Comparison | None, more: Comparison) -> Comparison:
    if before is None:
        return more
    return replace(
        before,
        maps={**before.maps, **more.maps},
        scores={**before.scores, **more.scores},
        failures={**before.failures, **more.failures},
    )
