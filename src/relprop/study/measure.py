"""A measure: from a batch that was explained to what is known of each image then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from relprop import requests
from relprop.methods import Method
from relprop.metrics.scorer import Probabilities

__all__ = ["Measure", "Measured", "Seen", "numbers"]


@dataclass(frozen=True, eq=False)
class Seen:
    """A batch that a method has explained.

    Attributes:
        model: The model.
        method: The method.
        names: What the images are called.
        x: The inputs.
        target: The explained classes.
        label: The true classes; -1 where they are not known.
        objects: Where the objects are in each image, ``(H, W)``; None where that is not known, or nobody asked.
        tickets: A number for each image, by its content, that decides all that is left to chance.
        scorer: The fastest way to the probabilities.
        attributions: What the method gave, ``(B, C, H, W)``; None where nobody asked.
    """

    model: Any
    method: Method
    names: Sequence[str]
    x: Tensor
    target: Tensor
    label: Tensor
    objects: Sequence[Tensor | None]
    tickets: Sequence[int]
    scorer: Probabilities
    attributions: Tensor | None = None

    @property
    def maps(self) -> Tensor:
        """The attributions, channels summed, ``(B, 1, H, W)``."""
        return self.raw.sum(1, keepdim=True)

    @property
    def raw(self) -> Tensor:
        """The attributions as they are."""
        assert self.attributions is not None  # a measure that wants them says so
        return self.attributions

    def explained(self) -> Seen:
        """The same batch with its attributions."""
        return replace(self, attributions=self._call(self.model, self.x, self.target))

    def ask(self, model: Any, x: Tensor, target: Tensor) -> Tensor:
        """The method's maps of another model, other inputs or classes, channels summed, ``(B, 1, H, W)``."""
        return self._call(model, x, target).sum(1, keepdim=True)

    def only(self, where: Sequence[int]) -> Seen:
        """Some of the images."""
        i = list(where)
        return replace(
            self,
            names=[self.names[n] for n in i],
            x=self.x[i],
            target=self.target[i],
            label=self.label[i],
            objects=[self.objects[n] for n in i],
            tickets=[self.tickets[n] for n in i],
            attributions=None if self.attributions is None else self.attributions[i],
        )

    def _call(self, model: Any, x: Tensor, target: Tensor) -> Tensor:
        # The scorer knows this model, and inputs of this size; methods that mask and score take it where it fits.
        fits = requests.module(model) is requests.module(self.model) and x.shape[1:] == self.x.shape[1:]
        fast: dict[str, Any] = {"scorer": self.scorer} if fits and "scorer" in self.method.options else {}
        return self.method(model, x, target, **fast)


Measured: TypeAlias = tuple[dict[str, float], dict[str, list[float]]]
"""The numbers and the curves of one image."""


def numbers(name: str, values: Tensor) -> list[Measured]:
    """One number of each image."""
    return [({name: float(value)}, {}) for value in values]


def _any(_: Method) -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Measure:
    """One metric under one protocol.

    Attributes:
        metric: Its name.
        protocol: The protocol's, or nothing where there is only one.
        run: From a batch to what was measured of each image, or a sentence that says why nothing can be.
        settings: What its rows depend on.
        main: The number that speaks for the others.
        maps: Whether it needs the attributions of the batch.
        objects: Whether it needs to know where the objects are; its rows depend on that too.
        company: Whether what it says of an image depends on the others of its batch; its rows depend on them too.
        unfit: Why it cannot be had of a method, in a sentence, or None.
        shared: Whether it scores images that another measure scores too.
        forwards: Forward passes that it takes for an image and a method, about.
        explanations: Explanations that it asks for, beyond that of the batch.
    """

    metric: str
    protocol: str
    run: Callable[[Seen], Sequence[Measured | str]] = field(repr=False)
    settings: Mapping[str, Any]
    main: str
    maps: bool = True
    objects: bool = False
    company: bool = False
    shared: bool = False
    unfit: Callable[[Method], str | None] = field(default=_any, repr=False)
    forwards: float = 0.0
    explanations: float = 0.0
