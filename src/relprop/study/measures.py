"""Measures: the metrics of a study, each with the settings that its rows are known by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.metrics import insertion_deletion, localisation, road, sanity
from relprop.metrics.insertion import PUBLISHED_STEP, published_places
from relprop.metrics.road import PERCENTILES
from relprop.study import probes
from relprop.study.measure import Measure, Measured, Seen, numbers

__all__ = ["METRICS", "NAMES", "PROTOCOLS", "make"]

PROTOCOLS = {
    "tie-safe": ("tie-safe",),
    "otsuki2024": ("otsuki2024",),
    "both": ("otsuki2024", "tie-safe"),
    "together": ("otsuki2024", "tie-safe"),
}
"""How insertion and deletion may be measured: by the published protocol, by one that ties cannot help, by both.

Together, the latter looks at its curves where the former does, so that a map without ties is masked and scored once.
"""

PUBLISHED_POINTS = 101
"""Of a curve, at 224 x 224 pixels."""

OPTIONS = ("points", "seeds", "baseline")
"""What insertion and deletion can be told in a study."""


class About(NamedTuple):
    """What there is to say of a metric before it is run.

    Attributes:
        says: What it measures, and whether more is better.
        cost: What an image costs with one method, beyond its explanation.
        make: From the protocol and the options to the measures.
    """

    says: str
    cost: str
    make: Callable[[str, Mapping[str, Any]], Sequence[Measure]]


def make(names: Sequence[str], protocol: str, options: Mapping[str, Any]) -> list[Measure]:
    """The measures of these names.

    Args:
        names: Metrics.
        protocol: For insertion and deletion: ``tie-safe``, ``otsuki2024``, ``both`` or ``together``.
        options: Of insertion and deletion: points; and under the tie-safe protocol baseline and seeds.

    Raises:
        RelpropError: If there is no such metric, protocol or option, or an option cannot be met.
    """
    if protocol not in PROTOCOLS:
        raise RelpropError(f"There is no protocol {protocol!r}; there are {', '.join(PROTOCOLS)}.")
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise RelpropError(f"A study has no option {unknown[0]!r}; metrics take {', '.join(OPTIONS)}.")
    if not isinstance(options.get("points"), int | None):
        raise RelpropError("A study's points are a number, for its rows are compared.")
    if not isinstance(options.get("baseline", ""), str | None):
        raise RelpropError("A study's baseline is a name, black, mean or blur, for its rows are known by it.")
    if unknown := [name for name in names if name not in METRICS]:
        raise RelpropError(f"There is no metric {unknown[0]!r}; there are {', '.join(METRICS)}.")
    return [measure for name in dict.fromkeys(names) for measure in METRICS[name].make(protocol, options)]


# -- Insertion and deletion --


def _insertions(protocol: str, options: Mapping[str, Any]) -> list[Measure]:
    return [_insertion(way, options, shared=protocol == "together") for way in PROTOCOLS[protocol]]


def _insertion(way: str, options: Mapping[str, Any], *, shared: bool) -> Measure:
    """The measure of one protocol; where masks are shared, the tie-safe one looks where the other does."""
    published = way == "otsuki2024"
    given = {k: v for k, v in options.items() if v is not None and (k == "points" or not published)}
    settings: dict[str, Any] = {"protocol": way} if published else {"points": 26, "seeds": 3, "baseline": "black"}
    settings |= given
    _try(settings)
    elsewhere = shared and not published and settings["baseline"] == "black"

    def run(seen: Seen) -> list[Measured]:
        # The published figures score the true class; a tie-safe score is about what was explained. Either is there.
        known = (seen.label >= 0) & (published | (seen.label < seen.model.outputs))
        label = torch.where(known, seen.label, seen.target)
        both = {"explained": seen.target, "true": label}
        first, second = ("true", "explained") if published else ("explained", "true")
        scored = torch.stack([both[first], both[second]], 1)
        # As published, gradient baselines are ranked by their first channel; all other maps by the sum.
        maps = seen.raw if published and seen.method.family == "captum" else seen.maps
        asked = dict(settings)
        if elsewhere:
            asked["points"] = _places(seen.x.shape[2:].numel(), settings["points"])
        every = insertion_deletion(
            seen.model, seen.x, maps, scored=scored, indices=seen.tickets, scorer=seen.scorer, **asked
        )
        scores, other = every.only(0), every.only(1)
        result = []
        for i in range(len(maps)):
            values = {n: float(getattr(scores, n)[i]) for n in ("insertion", "deletion", "score", "spread")}
            if known[i]:
                values[f"score of the {second} class"] = float(other.score[i])
            curves = {}
            for kind in ("insertion", "deletion"):
                curve = getattr(scores.curves, kind)
                curves[f"{kind} fraction"] = [round(float(v), 5) for v in curve.fraction[i]]
                curves[kind] = [round(float(v), 5) for v in curve.probability[i]]
            result.append((values, curves))
        return result

    curve = settings.get("points") or PUBLISHED_POINTS
    told = settings | ({"places": "otsuki2024"} if elsewhere else {})
    return Measure("insertion-deletion", way, run, told, "score", forwards=2.0 * curve, shared=shared)


def _places(size: int, points: int) -> int | list[int]:
    """Where the published protocol looks, if that is often enough."""
    return published_places(size, points)[0] if size >= PUBLISHED_STEP * points else points


def _try(settings: Mapping[str, Any]) -> None:
    """Refuses settings that cannot be met before anything is computed: a small image is scored by nobody."""
    x = torch.zeros(1, 1, 32, 32)
    insertion_deletion(
        None, x, x, 0, normalization=((0.5,), (0.5,)), scorer=lambda images: torch.ones(len(images), 1), **settings
    )


# -- Of maps alone, and of maps and objects --


def _local(name: str, measured: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., list[Measure]]:
    def run(seen: Seen) -> list[Measured]:
        regions = torch.stack([region for region in seen.objects if region is not None])
        return numbers(name, measured(seen.maps[:, 0], regions))

    return _one(name, run, objects=True)


def _sparseness(seen: Seen) -> list[Measured]:
    return numbers("sparseness", sanity.sparseness(seen.maps[:, 0]))


def _road(seen: Seen) -> list[Measured]:
    found = road(seen.model, seen.x, seen.maps, seen.target, indices=seen.tickets, scorer=seen.scorer)
    return numbers("road", found)


def _one(name: str, run: Callable[[Seen], Sequence[Measured | str]], **facts: Any) -> Callable[..., list[Measure]]:
    settings = facts.pop("settings", {})
    return lambda *_: [Measure(name, "", run, settings, name, **facts)]


_GRID = {"size": probes.GRID}

METRICS: dict[str, About] = {
    "insertion-deletion": About(
        "how fast the class appears, or vanishes, with the pixels ranked highest; their difference is the score: "
        "higher is better",
        "about 50 forward passes a protocol, more where ties are broken several times",
        _insertions,
    ),
    "road": About(
        "by how much the class falls more when the highest pixels are blended away than when the lowest are; higher is "
        "better, chance gets 0",
        "36 forward passes and 18 linear systems with an unknown a pixel, which take longer than all else",
        _one("road", _road, settings={"percentiles": list(PERCENTILES)}, forwards=36.0),
    ),
    "pointing-game": About(
        "whether the highest value lies on the object, or within 15 pixels; higher is better",
        "nothing",
        _local("pointing-game", localisation.pointing_game),
    ),
    "energy-pointing": About(
        "the part of the positive relevance that lies in the object's box; higher is better",
        "nothing",
        _local("energy-pointing", localisation.energy_pointing_game),
    ),
    "mass-accuracy": About(
        "the part of the positive relevance that lies on the object; higher is better",
        "nothing",
        _local("mass-accuracy", localisation.relevance_mass_accuracy),
    ),
    "rank-accuracy": About(
        "the part of the K highest pixels that lie on the object, which has K; higher is better",
        "nothing",
        _local("rank-accuracy", localisation.relevance_rank_accuracy),
    ),
    "effective-heat-ratio": About(
        "heat on the object a pixel that is hot, over what counts as hot; higher is better",
        "nothing",
        _local("effective-heat-ratio", localisation.effective_heat_ratio),
    ),
    "grid-pointing-game": About(
        "the part of the positive relevance that lies in the image's own cell among four images of different classes; "
        "higher is better, chance gets 0.25",
        "4 explanations",
        _one("grid-pointing-game", probes.grid, settings=_GRID, maps=False, company=True, explanations=4.0),
    ),
    "sparseness": About(
        "Gini index of the absolute values: 0 where all are the same, near 1 where few are not zero",
        "nothing",
        _one("sparseness", _sparseness),
    ),
    "conservation-error": About(
        "how far the attributions' sum is from what it should be, relative to it; lower is better. Of methods that "
        "promise a sum, and of LRP",
        "1 forward pass",
        _one("conservation-error", probes.conservation, unfit=probes.lawless, forwards=1.0),
    ),
    "class-sensitivity": About(
        "rank correlation of the maps of the predicted and of the least likely class; lower is better, for a map that "
        "is the same for every class explains none",
        "1 explanation",
        _one("class-sensitivity", probes.class_sensitivity, settings={"kind": "spearman"}, explanations=1.0),
    ),
    "max-sensitivity": About(
        "how much a map changes, at most, when the input hardly does, relative to it; lower is better",
        f"{probes.NEIGHBOURS + 1} explanations",
        _one(
            "max-sensitivity",
            probes.max_sensitivity,
            settings=probes.NEIGHBOURHOOD,
            maps=False,
            explanations=probes.NEIGHBOURS + 1.0,
        ),
    ),
    "randomisation": About(
        "mean rank correlation with the map while the model is randomised from the output down; lower is better, for "
        "what explains the model changes with it",
        f"{probes.STEPS + 1} explanations of models that are traced anew: a lot; a few images are enough",
        _one(
            "randomisation",
            probes.randomisation,
            settings=probes.CASCADE,
            maps=False,
            explanations=probes.STEPS + 1.0,
        ),
    ),
}
"""By name, in the order of tables."""

NAMES = tuple(METRICS)
