"""Measures: the metrics of a study, each with the settings that its rows are known by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.metrics import insertion_deletion, localisation, sanity

PROTOCOLS = {"tie-safe": ("tie-safe",), "otsuki2024": ("otsuki2024",), "both": ("otsuki2024", "tie-safe")}
"""How insertion and deletion may be measured: by the published protocol, by one that ties cannot help, by both."""


class Seen(NamedTuple):
    """A batch that was explained.

    Attributes:
        model: The model.
        x: Its inputs.
        target: The explained classes.
        label: The true classes; -1 where they are not known.
        objects: Where the objects are, ``(B, H, W)``, or None where a dataset does not tell.
        tickets: A number for each image, by its content, that decides how ties are broken.
        scorer: The fastest way to the probabilities.
    """

    model: Any
    x: Tensor
    target: Tensor
    label: Tensor
    objects: Tensor | None
    tickets: Sequence[int]
    scorer: Callable[[Tensor], Tensor]


Measured = tuple[dict[str, float], dict[str, list[float]]]
"""The numbers and the curves of one image."""


@dataclass(frozen=True, eq=False)
class Measure:
    """One metric under one protocol.

    Attributes:
        metric: Its name.
        protocol: The protocol's, or nothing where there is only one.
        run: From a batch and its maps, ``(B, C, H, W)``, to what was measured of each image.
        settings: What its rows depend on.
        objects: Whether it needs to know where the objects are.
        first_channel: Whether gradient baselines are ranked by their first channel alone, as published.
    """

    metric: str
    protocol: str
    run: Callable[[Seen, Tensor], list[Measured]] = field(repr=False)
    settings: Mapping[str, Any]
    objects: bool = False
    first_channel: bool = False


def make(names: Sequence[str], protocol: str, options: Mapping[str, Any]) -> list[Measure]:
    """The measures of these names.

    Args:
        names: Metrics.
        protocol: For insertion and deletion: ``tie-safe``, ``otsuki2024`` or ``both``.
        options: Of insertion and deletion: points; and under the tie-safe protocol baseline and seeds.

    Raises:
        RelpropError: If there is no such metric or protocol.
    """
    if protocol not in PROTOCOLS:
        msg = f"There is no protocol {protocol!r}; there are {', '.join(PROTOCOLS)}."
        raise RelpropError(msg)
    measures = []
    for name in names:
        if name == "insertion-deletion":
            measures += [_insertion(way, options) for way in PROTOCOLS[protocol]]
        elif name in _LOCALISATION:
            measures.append(Measure(name, "", _local(name), {}, objects=True))
        elif name == "sparseness":
            measures.append(Measure(name, "", _sparseness, {}))
        else:
            msg = f"There is no metric {name!r}; there are {', '.join(NAMES)}."
            raise RelpropError(msg)
    return measures


def _insertion(way: str, options: Mapping[str, Any]) -> Measure:
    published = way == "otsuki2024"
    given = {k: v for k, v in options.items() if v is not None and (k == "points" or not published)}
    settings: dict[str, Any] = {"protocol": way} if published else {"points": 26, "seeds": 3, "baseline": "black"}
    settings |= given

    def run(seen: Seen, maps: Tensor) -> list[Measured]:
        # The published figures score the true class; a tie-safe score is about what was explained. Either is there.
        label = torch.where(seen.label < 0, seen.target, seen.label)
        both = {"explained": seen.target, "true": label}
        first, second = ("true", "explained") if published else ("explained", "true")
        scored = torch.stack([both[first], both[second]], 1)
        every = insertion_deletion(
            seen.model, seen.x, maps, scored=scored, indices=seen.tickets, scorer=seen.scorer, **settings
        )
        scores, other = every.only(0), every.only(1)
        result = []
        for i in range(len(maps)):
            numbers = {n: float(getattr(scores, n)[i]) for n in ("insertion", "deletion", "score", "spread")}
            if seen.label[i] >= 0:
                numbers[f"score of the {second} class"] = float(other.score[i])
            curves = {}
            for kind in ("insertion", "deletion"):
                curve = getattr(scores.curves, kind)
                curves[f"{kind} fraction"] = [round(float(v), 5) for v in curve.fraction[i]]
                curves[kind] = [round(float(v), 5) for v in curve.probability[i]]
            result.append((numbers, curves))
        return result

    return Measure("insertion-deletion", way, run, settings, first_channel=published)


_LOCALISATION = {
    "pointing-game": localisation.pointing_game,
    "energy-pointing": localisation.energy_pointing_game,
    "mass-accuracy": localisation.relevance_mass_accuracy,
    "rank-accuracy": localisation.relevance_rank_accuracy,
    "effective-heat-ratio": localisation.effective_heat_ratio,
}
NAMES = ("insertion-deletion", *_LOCALISATION, "sparseness")


def _local(name: str) -> Callable[[Seen, Tensor], list[Measured]]:
    def run(seen: Seen, maps: Tensor) -> list[Measured]:
        assert seen.objects is not None
        values = _LOCALISATION[name](maps.sum(1), seen.objects)
        return [({name: float(v)}, {}) for v in torch.as_tensor(values)]

    return run


def _sparseness(seen: Seen, maps: Tensor) -> list[Measured]:  # noqa: ARG001 - of a map alone
    return [({"sparseness": float(v)}, {}) for v in sanity.sparseness(maps.sum(1))]
