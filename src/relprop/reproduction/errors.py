"""Errors: which explanations failed, and how, by a criterion that needs no eye.

The paper calls an explanation a failure if its ID is not above the mean of the best baseline, looks at the hundred with
the lowest ID, and sorts them by hand into Insufficiently, Over- and Wrongly Attended. Here the object's boxes sort:

- *attended* are the pixels that Heat Quantization leaves above its lowest level;
- **Wrongly Attended**: less than half of the attended relevance lies in the boxes;
- else **Over-Attended**: more pixels are attended than the boxes have;
- else **Insufficiently Attended**.
"""

# ruff: noqa: PLC0415 - matplotlib is imported where it paints

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from relprop import datasets, methods
from relprop.datasets import Dataset
from relprop.errors import RelpropError
from relprop.figure import glow, limit
from relprop.reproduction.claims import CATEGORIES, EXAMINED, FAILED
from relprop.reproduction.tables import PUBLISHED, Values, markdown, values
from relprop.study import Row

METHOD, BASELINES = "released+hq-released", ("grad-cam", "score-cam")
INSUFFICIENTLY, OVER, WRONGLY = CATEGORIES


@dataclass(frozen=True)
class Failure:
    """An explanation that failed.

    Attributes:
        image: The image's name.
        score: Its ID, by the published protocol.
        inside: The share of the attended relevance that lies in the boxes.
        attended: The share of the pixels that are attended.
        object: The share of the pixels that lie in the boxes.
        category: What is wrong with it.
    """

    image: str
    score: float
    inside: float
    attended: float
    object: float
    category: str


def threshold(found: Values) -> float:
    """The best baseline's mean ID, by the published protocol, on the images that have been measured."""
    means = [
        sum(scores.values()) / len(scores)
        for name in BASELINES
        if (scores := found.get((name, PUBLISHED, "score"), {}))
    ]
    if not means:
        raise RelpropError(f"No baseline was measured; relprop reproduce table1 measures {' and '.join(BASELINES)}.")
    return max(means)


def failed(found: Values) -> dict[str, float]:
    """The images whose ID is not above the best baseline's mean, the lowest first."""
    limit_ = threshold(found)
    scores = found.get((METHOD, PUBLISHED, "score"), {})
    return dict(sorted(((i, s) for i, s in scores.items() if s <= limit_), key=lambda pair: pair[1]))


def sort(heat: Tensor, inside: Tensor) -> dict[str, Any]:
    """Puts one quantised map into a category.

    Args:
        heat: The map, ``(H, W)``.
        inside: Where the boxes are, ``(H, W)``.
    """
    attended = heat > heat.min()
    mass = heat.double().clamp(min=0) * attended
    share = float(mass[inside].sum() / mass.sum()) if mass.sum() > 0 else 0.0
    area, size = float(attended.double().mean()), float(inside.double().mean())
    category = WRONGLY if share < 0.5 else OVER if area > size else INSUFFICIENTLY
    return {"inside": share, "attended": area, "object": size, "category": category}


def examine(model: Any, data: Dataset, scores: Mapping[str, float]) -> tuple[list[Failure], list[tuple[Any, Tensor]]]:
    """Sorts the failures with the lowest ID; those without boxes cannot be.

    Returns:
        The failures, and the photo and map of each.
    """
    lowest = list(scores)[:EXAMINED]
    samples = {s.name: s for s in data if s.name in lowest}
    chosen = [samples[name] for name in lowest if name in samples]
    found, pictures = [], []
    subset = Dataset(data.name, data.root, data.layout, tuple(chosen), data.classes)
    for batch in datasets.batches(subset, model.prepare, 8):
        maps = methods.get(METHOD)(model, batch.x)[:, 0]
        for sample, heat in zip(batch.samples, maps, strict=True):
            inside = sample.objects(model.preparation)
            if inside is not None and inside.any():
                found.append(Failure(sample.name, scores[sample.name], **sort(heat, inside)))
                pictures.append((model.crop(sample.path), heat))
    return found, pictures


def write(failures: Sequence[Failure], path: Path) -> None:
    """Writes the failures as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Failure)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, failures))


def read(path: Path) -> list[Failure]:
    """Reads what :func:`write` has written."""
    with path.open(newline="") as file:
        return [
            Failure(**{k: v if k in ("image", "category") else float(v) for k, v in row.items()})  # type: ignore[arg-type] # each as its field wants it
            for row in csv.DictReader(file)
        ]


def table(failures: Sequence[Failure], rows: Sequence[Row]) -> str:
    """How many failures there are of each kind, beside the paper's; and in how many the model was wrong.

    Where it was, the published protocol scores a class that nobody explained.
    """
    found = values(rows)
    count, images = len(failed(found)), len(found.get((METHOD, PUBLISHED, "score"), {}))
    wrong = {row.image for row in rows if row.label not in (None, row.target)} & failed(found).keys()
    kinds = Counter(failure.category for failure in failures)
    lines = [
        ["", "failures", *CATEGORIES, "examined", "images", "failures where the model was wrong"],
        ["paper", f"{FAILED:.1%}", *map(str, CATEGORIES.values()), str(EXAMINED), "1000", ""],
        ["here", f"{count / images:.1%}", *(str(kinds[c]) for c in CATEGORIES), str(len(failures)), str(images)],
    ]
    return markdown([*lines[:2], [*lines[2], f"{len(wrong)} of {count}"]])


def sheet(failures: Sequence[Failure], pictures: Sequence[tuple[Any, Tensor]], path: Path) -> None:
    """A contact sheet, the categories below one another, to check them by eye."""
    from matplotlib.figure import Figure

    order = sorted(range(len(failures)), key=lambda i: list(CATEGORIES).index(failures[i].category))
    columns = 8
    rows = max(1, -(-len(order) // columns))
    figure = Figure(figsize=(2 * columns, 2.45 * rows), layout="constrained")
    for axes in (grid := figure.subplots(rows, columns, squeeze=False)).flat:
        axes.axis("off")
    for axes, i in zip(grid.flat, order, strict=False):
        photo, heat = pictures[i]
        f = failures[i]
        axes.imshow(glow(heat.float(), photo, limit(heat.float())))
        title = (
            f"{f.category}\nID {f.score:.2f}, {f.inside:.0%} inside\n{f.attended:.0%} attended, object {f.object:.0%}"
        )
        axes.set_title(title, fontsize=7)
    figure.savefig(path, dpi=100)
