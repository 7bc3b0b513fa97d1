"""The shelf: the models that a server offers, and the few of them that are loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relprop import catalogue, zoo
from relprop.errors import RelpropError
from relprop.fetching import quiet
from relprop.zoo import Model

__all__ = ["Shelf", "Wanted"]

_RANDOM = "random"
_ROOM = 3
_SIDE = 640  # pixels that an image has at most for a model of a visitor's


class Wanted(NamedTuple):
    """Which model a visitor wants.

    Attributes:
        model: Its name; None for the server's first.
        weights: Theirs; None for the first that there are.
        checkpoint: The visitor's own instead.
        visit: Whose those are.
    """

    model: str | None = None
    weights: str | None = None
    checkpoint: Path | None = None
    visit: str = ""


class Shelf:
    """Models by name and weights; nothing is ever fetched for a visitor, and no path of a visitor's is followed.

    It is used by one thread at a time, that of the gate.

    Args:
        first: The models that the server was started with; the first one is the one that a visitor gets unasked.
    """

    def __init__(self, first: Sequence[Model]) -> None:
        self.given = {(model.name, model.source.weights): model for model in first}
        self.default = next(iter(self.given))
        self._loaded: OrderedDict[tuple[str, ...], Model] = OrderedDict()

    @property
    def offers(self) -> Mapping[str, tuple[str, ...]]:
        """The weights that can be had for each model, without a network."""
        offers: dict[str, list[str]] = {}
        for name, weights in self.given:
            offers.setdefault(name, []).append(weights)
        for name in zoo.names():
            offers.setdefault(name, []).extend([*catalogue.cached(name), _RANDOM])
        return {name: tuple(dict.fromkeys(weights)) for name, weights in offers.items()}

    def get(self, wanted: Wanted) -> Model:
        """One of the offers, or one of them with a visitor's weights.

        Raises:
            RelpropError: There is no such offer, or the weights cannot be used.
        """
        offers = self.offers
        name = wanted.model or self.default[0]
        if name not in offers:
            raise RelpropError(f"This server has no model {name!r}; it has {', '.join(offers)}.")
        if wanted.checkpoint is not None:
            path = wanted.checkpoint
            try:
                model = self._kept((name, wanted.visit, path.name), str(path))
            except RelpropError as error:
                raise RelpropError(str(error).replace(str(path), "Your checkpoint")) from error
            side = max(model.preparation.resize, model.preparation.crop)
            if side > _SIDE:  # it may say so itself, of any size
                raise RelpropError(f"Your checkpoint wants images of {side} pixels; this server makes {_SIDE} at most.")
            return model
        weights = wanted.weights or offers[name][0]
        if weights not in offers[name]:
            raise RelpropError(f"This server has no weights {weights!r} for {name}; it has {', '.join(offers[name])}.")
        return self.given.get((name, weights)) or self._kept((name, weights), weights)

    def forget(self, visit: str) -> None:
        """Drops what only one visitor could have."""
        for key in [key for key in list(self._loaded) if len(key) > 2 and key[1] == visit]:
            self._loaded.pop(key, None)

    def _kept(self, key: tuple[str, ...], weights: str) -> Model:
        if key not in self._loaded:
            while len(self._loaded) >= _ROOM:  # before the next one is loaded, so that both are never there
                self._loaded.popitem(last=False)
            self._loaded[key] = zoo.load(key[0], weights, report=quiet)
        self._loaded.move_to_end(key)
        return self._loaded[key]
