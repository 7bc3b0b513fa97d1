"""Trials: what becomes of a piece whose worker died.

It is done again, once. If that ends another worker, its images are tried one by one, alone: an image that ends two
workers which had nothing else to do is set aside, and the piece is done without it. Where no image does, the piece gets
one more chance, for it may have been nobody's fault; then all of it is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from relprop.study.pieces import Piece

__all__ = ["Trials"]

TRIES = 2

# A worker that was ended, or one that lives and could not do it.
_GUILTY = f"Tried alone, it failed {TRIES} times ({{}})."


@dataclass
class _Trial:
    """The images of a piece, one by one."""

    piece: Piece
    waiting: set[str]
    guilty: dict[str, str] = field(default_factory=dict)


class Trials:
    """Who died of what.

    Attributes:
        aside: Images that were set aside since it was last asked, each with its piece and the reason.
    """

    def __init__(self) -> None:
        self.aside: list[tuple[Piece, str, str]] = []
        self._deaths: dict[tuple[str, str], int] = {}
        self._trials: dict[str, _Trial] = {}
        self._acquitted: set[str] = set()

    @staticmethod
    def alone(piece: Piece) -> str | None:
        """The image that a piece is to try alone; None for a piece of a study."""
        return piece.id.partition("/")[2] or None

    def blame(self, piece: Piece, why: str) -> list[Piece]:
        """A worker died of a piece, or it failed as a whole.

        Returns:
            What is to be done next.
        """
        whole, _, image = piece.id.partition("/")
        deaths = self._deaths[whole, image] = self._deaths.get((whole, image), 0) + 1
        if deaths < TRIES:
            return [piece]
        if image:
            self._trials[whole].guilty[image] = _GUILTY.format(why)
            return self._heard(whole, image)
        names = [sample.name for sample in piece.samples]
        if whole in self._acquitted:
            reason = f"Together with its batch it failed several times, alone it did not ({why})."
            self.aside += [(piece, name, reason) for name in names]
            return []
        if len(names) == 1:
            self.aside.append((piece, names[0], _GUILTY.format(why)))
            return []
        self._trials[whole] = _Trial(piece, set(names))
        every = {sample.name for sample in piece.batch.samples}
        return [replace(piece, id=f"{whole}/{name}", without=frozenset(every - {name})) for name in names]

    def acquit(self, piece: Piece) -> list[Piece]:
        """An image that was tried alone did no harm; what is to be done next."""
        whole, _, image = piece.id.partition("/")
        return self._heard(whole, image)

    def _heard(self, whole: str, image: str) -> list[Piece]:
        trial = self._trials[whole]
        trial.waiting.discard(image)
        if trial.waiting:
            return []
        del self._trials[whole], self._deaths[whole, ""]
        self._acquitted |= {whole} if not trial.guilty else set()
        self.aside += [(trial.piece, name, why) for name, why in trial.guilty.items()]
        rest = replace(trial.piece, without=trial.piece.without | trial.guilty.keys())
        return [rest] if rest.samples else []
