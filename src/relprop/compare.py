"""Comparisons: several methods on one image, and what insertion and deletion say of each under both protocols.

Everything here computes and nothing paints or writes: `relprop.compare_figure` makes the pictures, and the shell's verb
the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from relprop import methods as registry
from relprop import requests
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.metrics import Scores, insertion_deletion
from relprop.metrics.baselines import baseline_of
from relprop.metrics.insertion import POINTS, PUBLISHED_STEP
from relprop.metrics.scorer import classes, fastest, probabilities

__all__ = ["METHODS", "PROTOCOLS", "Comparison", "Progress", "compare"]

Progress: TypeAlias = Callable[[float, str], None]
"""Told which part of all is done, from 0 to 1, and what is being done; to end a comparison, raise whenever called."""

PROTOCOLS: Mapping[str, str] = {"otsuki2024": "published", "tie-safe": "tie-safe"}
"""How insertion and deletion are measured, and what that is called beside a picture."""

METHODS = ("relprop", "released+hq-released", "grad-cam", "integrated-gradients", "random")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several methods' maps of one image, scored.

    Attributes:
        target: The class that was explained.
        probability: Its probability.
        true: The class that the published protocol scored, where that is another question than the explained one; None
            where both protocols scored the target.
        maps: The attributions of each method that could be had, ``(C, H, W)``, or ``(1, H, W)`` from one that knows
            places only.
        scores: Of each of those methods, under each of :data:`PROTOCOLS`; for a batch of one.
        failures: Why the other methods could not be had, in a sentence each.
        settings: What the scores depend on, in JSON types.
    """

    target: int
    probability: float
    true: int | None
    maps: Mapping[str, Tensor] = field(repr=False)
    scores: Mapping[str, Mapping[str, Scores]] = field(repr=False)
    failures: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that have a map and scores, in the order in which they were asked for."""
        return tuple(self.maps)

    def heatmap(self, method: str) -> Tensor:
        """A method's map, ``(H, W)``: the channels summed."""
        return self.maps[method].sum(0)

    def scored(self, protocol: str) -> int:
        """The class that was scored under a protocol."""
        return self.true if protocol == "otsuki2024" and self.true is not None else self.target

    def number(self, method: str, protocol: str, score: str = "score") -> float:
        """One number: ``score`` (the ID score), ``insertion``, ``deletion`` or ``spread``."""
        return float(getattr(self.scores[method][protocol], score)[0])

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each method and protocol, in JSON types."""
        for method in self.methods:
            for protocol in PROTOCOLS:
                numbers = {n: self.number(method, protocol, n) for n in ("insertion", "deletion", "score", "spread")}
                yield {"method": method, "protocol": protocol, "scored": self.scored(protocol), **numbers}

    def points(self) -> Iterator[dict[str, Any]]:
        """A row for each point of each curve, in JSON types."""
        for method in self.methods:
            for protocol in PROTOCOLS:
                for kind, curve in self.scores[method][protocol].curves._asdict().items():
                    about = {"method": method, "protocol": protocol, "curve": kind}
                    for fraction, probability in zip(*(axis[0].tolist() for axis in curve), strict=True):
                        yield {**about, "fraction": fraction, "probability": probability}


def compare(
    model: Any,
    x: Tensor,
    methods: Sequence[str | Method] = METHODS,
    target: int | None = None,
    *,
    true: int | None = None,
    points: int | None = None,
    seeds: int = 3,
    normalization: Any = None,
    progress: Progress | None = None,
) -> Comparison:
    """Explains one image with several methods and scores every map, under the published and under a tie-safe protocol.

    The numbers are those of `relprop.insertion_deletion`, with missing pixels black. A map is ranked by the sum of its
    channels; as published, the gradient baselines' maps are ranked by the first channel under ``otsuki2024``.

    Args:
        model: A module in evaluation mode that returns logits, or what ``relprop.load`` returns.
        x: The image, normalised, ``(1, C, H, W)``.
        methods: Names of methods, see ``relprop.methods``, or methods of your own. Each is taken once.
        target: The class to explain; None for the predicted one.
        true: The true class, if it is known: the published protocol scores that one, as it was published. Without it
            the explained class is scored under both.
        points: Points of a curve under either protocol; by default 26, and all that were published.
        seeds: Random orders in which tied pixels are taken, under the tie-safe protocol.
        normalization: Mean and standard deviation of the channels, if the model does not tell.
        progress: Told of every step.

    Returns:
        The comparison. A method that fails is named in ``failures``, and the others are there.

    Raises:
        RelpropError: If the request cannot be met; before any method has been run.
    """
    requests.check_input(x, requests.module(model))
    _check(x, methods, points, seeds)
    named = {m.name: m for m in (m if isinstance(m, Method) else registry.get(m) for m in methods)}
    told = normalization if normalization is not None else getattr(model, "normalization", None)
    baseline_of("black", x, told)  # now, for what black is must be known
    most = math.ceil(x[0, 0].numel() / PUBLISHED_STEP)
    forwards = {"otsuki2024": 2 * min(points or most, most), "tie-safe": 2 * (points or POINTS)}
    scoring = sum(forwards.values())
    steps = _Steps(sum(method.cost + scoring for method in named.values()), progress)
    steps.tell("getting ready")
    scorer = fastest(model, x, forwards=len(named) * scoring)
    output = probabilities(scorer, x)
    explained = int(classes(target, output))
    label = None if true is None else int(classes(true, output))
    how: dict[str, dict[str, Any]] = {
        "otsuki2024": {"protocol": "otsuki2024", "scored": explained if label is None else label},
        "tie-safe": {"seeds": seeds, "scored": explained},
    }
    maps: dict[str, Tensor] = {}
    scores: dict[str, dict[str, Scores]] = {}
    failures: dict[str, str] = {}
    for name, method in named.items():
        steps.tell(f"explaining by {name}")
        fast = {"scorer": scorer} if "scorer" in method.options else {}  # for those that mask and score
        try:
            found = method(model, x, explained, progress=steps.within(method.cost), **fast)
        except RelpropError as error:
            failures[name] = str(error)
            steps.done += method.cost + scoring
            continue
        steps.done += method.cost
        maps[name], scores[name] = found[0].cpu(), {}
        for protocol, settings in how.items():
            steps.tell(f"scoring {name}, {PROTOCOLS[protocol]}")
            first = protocol == "otsuki2024" and method.family == "captum"
            ranked = found if first else found.sum(1, keepdim=True)
            scores[name][protocol] = insertion_deletion(
                model, x, ranked, points=points, normalization=told, scorer=scorer, **settings
            )
            steps.done += forwards[protocol]
    steps.tell("done")
    settled = {"points": points, "seeds": seeds, "baseline": "black"}
    return Comparison(explained, float(output[0, explained]), label, maps, scores, failures, settled)


@dataclass
class _Steps:
    """How far a comparison is, in forward passes."""

    total: float
    progress: Progress | None
    done: float = 0.0
    doing: str = ""

    def tell(self, doing: str) -> None:
        self.doing = doing
        self._tell(self.done)

    def within(self, cost: float) -> Callable[[int, int], None]:
        """For a method that costs so much, and tells of it by itself."""
        return lambda done, total: self._tell(self.done + cost * done / total)

    def _tell(self, done: float) -> None:
        if self.progress is not None:
            self.progress(done / self.total, self.doing)


def _check(x: Tensor, methods: Sequence[str | Method], points: Any, seeds: Any) -> None:
    """Refuses what would only be noticed after the first method."""
    if x.ndim != 4 or len(x) != 1:
        raise RelpropError(f"A comparison is of one image, (1, C, H, W), not of an input of shape {tuple(x.shape)}.")
    if (pixels := x[0, 0].numel()) <= PUBLISHED_STEP:
        raise RelpropError(
            f"The image has {pixels} pixels, where the published protocol moves {PUBLISHED_STEP} at once; enlarge it."
        )
    if isinstance(methods, str) or not methods:
        raise RelpropError(f"methods is {methods!r}; pass a list with at least one name.")
    for name, number, least in (("points", 2 if points is None else points, 2), ("seeds", seeds, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise RelpropError(f"{name} is {number!r}; pass a number of at least {least}.")
