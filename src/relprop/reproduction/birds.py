"""Birds: the paper's column for CUB-200-2011, from networks that were trained with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from relprop import training
from relprop.errors import RelpropError
from relprop.reproduction.claims import CLAIMS, CONTROLS
from relprop.reproduction.page import written
from relprop.reproduction.tables import PUBLISHED, SCORES, TIE_SAFE, markdown
from relprop.reproduction.work import Work
from relprop.study import Row, estimate, read

__all__ = ["LOCAL", "PAPER", "Birds", "found", "localisation", "refresh", "table"]

PAPER: Mapping[str, Sequence[tuple[float, float]]] = {
    "captum-lrp": ((0.058, 0.002), (0.047, 0.001), (0.011, 0.000)),
    "integrated-gradients": ((0.020, 0.001), (0.015, 0.001), (0.006, 0.000)),
    "guided-backprop": ((0.042, 0.002), (0.014, 0.001), (0.028, 0.002)),
    "deeplift": ((0.024, 0.002), (0.018, 0.001), (0.006, 0.001)),
    "grad-cam": ((0.508, 0.015), (0.055, 0.004), (0.453, 0.011)),
    "score-cam": ((0.511, 0.017), (0.054, 0.004), (0.457, 0.014)),
    "released+hq-released": ((0.595, 0.010), (0.014, 0.000), (0.582, 0.010)),
}
"""Insertion, deletion and ID of table 1's column for CUB: mean and standard deviation over five trainings."""

EVERY_SEED = ("released+hq-released", "released", "grad-cam", *(line.method for line in CONTROLS))
"""What every network is explained by; the first one is explained by all methods of table 1."""

LOCAL = ("pointing-game", "mass-accuracy", "rank-accuracy", "effective-heat-ratio")
"""How well maps find the bird, by its mask."""

TABLE = "table1"
_LINES = (*CLAIMS[TABLE].lines, *CONTROLS)
_WEIGHTS = "weights.safetensors"


def found(weights: Path) -> dict[str, Path]:
    """The weights files of a training, by seed: those in a folder that ``relprop train`` wrote, or a single file.

    Raises:
        RelpropError: If there are none.
    """
    if weights.is_file():
        return {name if (name := weights.parent.name).startswith("seed") else "seed0": weights}
    there = {path.parent.name: path for path in sorted(weights.glob(f"seed*/{_WEIGHTS}"))}
    if not there:
        raise RelpropError(
            f"There are no trained networks in {weights}; make some with relprop train cub --seeds 5 --out FOLDER, and "
            "pass --weights FOLDER."
        )
    return there


@dataclass
class Birds:
    """The evaluation of several trainings.

    Attributes:
        models: From a seed's name to what ``relprop.load`` returns; called when its turn has come.
        work: What all of them are measured with; its folder gets a study for each seed.
    """

    models: Mapping[str, Callable[[], Any]]
    work: Work

    def measured(self) -> dict[str, list[Row]]:
        """The rows of every seed, measured where they are lacking."""
        data, rows = self.work.whole, {}
        settings = {"metrics": ("insertion-deletion", *LOCAL), "protocol": "together", **self.work.settings}
        for number, (seed, load) in enumerate(self.models.items()):
            model = load()
            if model.outputs != len(data.classes or ()):
                raise RelpropError(
                    f"The network of {seed} has {model.outputs} classes and {data.name} has "
                    f"{len(data.classes or ())}; pass weights that were trained on it."
                )
            chosen = [m for m in CLAIMS[TABLE].methods if number == 0 or m.name in EVERY_SEED]
            work = replace(self.work, model=model, out=self.work.out / seed, settings=settings, failures={})
            rows[seed] = work.measured(chosen)
            self.work.failures |= {f"{seed}, {name}": why for name, why in work.failures.items()}
        return rows

    def __call__(self) -> str:
        """Measures, and writes the tables beside the rows."""
        rows = self.measured()
        return self.work.kept(TABLE, f"{table(rows)}\n\n{localisation(rows)}")


Seeds = Mapping[str, Iterable[Row]]
"""The rows of each training."""


def table(seeds: Seeds) -> str:
    """The paper's column beside ours: means over images, of which the mean and standard deviation over trainings.

    ID has a 95 % interval too, over the images; an image's score is its mean over trainings.
    """
    columns = _columns(seeds)
    groups = ("paper", "published", "tie-safe")
    body = [["", *(f"{where} {name}" for where in groups for name in ("Ins", "Del", "ID")), "trainings", "n"]]
    for line in _LINES:
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in PAPER.get(line.method, ())] or [""] * 3
        for protocol in (PUBLISHED, TIE_SAFE):
            found = {name: columns.get((line.method, protocol, name), {}) for name in SCORES}
            cells += [f"{_shown(found[name])}{_interval(found[name]) if name == 'score' else ''}" for name in SCORES]
        body.append([line.label, *cells, *_counts(columns.get((line.method, PUBLISHED, "score"), {}))])
    return f"{markdown(body)}\n\n{_accuracy(seeds)}"


def localisation(seeds: Seeds) -> str:
    """How well maps find the bird, likewise."""
    columns = _columns(seeds)
    body = [["", *LOCAL, "trainings", "n"]]
    for line in _LINES:
        cells = [_shown(columns.get((line.method, name, name), {})) for name in LOCAL]
        body.append([line.label, *cells, *_counts(columns.get((line.method, LOCAL[0], LOCAL[0]), {}))])
    return markdown(body)


def refresh(text: str, folder: Path) -> str:
    """A page with its blocks written anew: trainings by what was trained, and the two tables.

    Args:
        text: The page.
        folder: Results: ``head``, ``layer4`` and ``all`` as ``relprop train`` writes them, ``table1`` as :class:`Birds`
            does.
    """

    def trainings(part: str) -> str:
        return training.tabulate([training.Outcome.read(place) for place in sorted((folder / part).glob("seed*"))])

    def seeds() -> Seeds:
        return {place.name: read(place) for place in sorted((folder / TABLE).glob("seed*"))}

    blocks: dict[str, Callable[[], str]] = {part: partial(trainings, part) for part in ("head", "layer4", "all")}
    return written(text, {**blocks, TABLE: lambda: table(seeds()), "localisation": lambda: localisation(seeds())})


Column: TypeAlias = dict[str, dict[str, float]]
"""A number of each image, by training."""


def _columns(seeds: Seeds) -> dict[tuple[str, str, str], Column]:
    """By method, protocol (or metric) and score.

    Raises:
        RelpropError: If an image was measured twice.
    """
    columns: dict[tuple[str, str, str], Column] = {}
    for seed, rows in seeds.items():
        for row in rows:
            for name, value in row.values.items():
                column = columns.setdefault((row.method, row.protocol or row.metric, name), {}).setdefault(seed, {})
                if row.image in column:
                    what = " ".join((row.image, row.method, row.metric, row.protocol))
                    raise RelpropError(f"{what} has two rows in {seed}, measured under different settings.")
                column[row.image] = value
    return columns


def _shown(column: Column) -> str:
    return _spread([mean(values.values()) for values in column.values()], ".3f") if column else ""


def _interval(column: Column) -> str:
    images = set[str]().union(*column.values())
    values = [mean(by[image] for by in column.values() if image in by) for image in sorted(images)]
    if len(values) < 2:
        return ""
    found = estimate(values)
    return f" [{found.low:.3f}, {found.high:.3f}]"


def _spread(values: Sequence[float], form: str) -> str:
    text = f"{mean(values):{form}}"
    return f"{text} ± {stdev(values):{form}}" if len(values) > 1 else text


def _counts(column: Column) -> list[str]:
    counts = sorted({len(values) for values in column.values()})
    return [str(len(column)), "/".join(map(str, counts)) or "0"]


def _accuracy(seeds: Seeds) -> str:
    """How many of the images the networks get right; the published protocol scores the true class."""
    right = []
    for rows in seeds.values():
        images = {row.image: row.label == row.target for row in rows}
        if images:
            right.append(100 * mean(images.values()))
    if not right:
        return "Nothing has been measured yet."
    return f"The networks classify {_spread(right, '.1f')} % of these images rightly."
