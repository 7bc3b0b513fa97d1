"""How the cost of `paper` grows: with the batch, the image's side, the network's depth, the targets and the images."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from subject import Forwards, faster, images, in_turns, resnet
from torch import Tensor, nn

import relprop
from relprop.memory import keep_freed
from relprop.reproduction.tables import markdown

HEADS = {
    "batch": "images in a batch",
    "side": "pixels a side, batch 1",
    "depth": "layers of the ResNet, batch 4",
    "targets": "targets of one image",
    "images": "images in a row, batch 8",
}
DEEP, ROW = 4, 8  # batch sizes


@dataclass(frozen=True)
class Settings:
    """What it grows with, and how often each is timed."""

    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    sides: tuple[int, ...] = (112, 224, 448, 896)
    depth: tuple[int, ...] = (18, 34, 50, 101, 152)
    targets: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    images: tuple[int, ...] = (10, 100, 1000)
    side: int = 224
    rounds: int = 3


QUICK = Settings((1, 2), (32, 64), (18, 34), (1, 3), (2, 10), side=32, rounds=1)


def measure(settings: Settings) -> dict[str, Any]:
    """Time `paper` in turns with both forward passes, at every size of everything."""
    keep_freed()
    model = resnet()
    forwards = Forwards(model)
    series: dict[str, list[dict[str, float]]] = {name: [] for name in HEADS}
    for batch in settings.batch:
        series["batch"].append(point(model, forwards, batch, images(batch, settings.side), settings.rounds))
    for side in settings.sides:
        series["side"].append(point(model, forwards, side, images(1, side), settings.rounds))
    for count in settings.targets:
        series["targets"].append(point(model, forwards, count, images(1, settings.side, count), settings.rounds))
    for count in settings.images:
        series["images"].append(long_run(model, forwards, count, settings))
    for layers in settings.depth:
        deep = resnet(f"resnet{layers}")
        series["depth"].append(point(deep, Forwards(deep), layers, images(DEEP, settings.side), settings.rounds))
    return {"side": settings.side, "series": series}


def point(
    model: nn.Module, forwards: Forwards, size: int, asked: tuple[Tensor, Tensor], rounds: int
) -> dict[str, float]:
    """One size: milliseconds an image, and the ratio to the faster forward pass."""
    x, target = asked
    best = in_turns(forwards.of(x) | {"it": partial(relprop.explain, model, x, target)}, rounds)
    return noted(size, rounds, best["it"] / len(x), faster(best) / len(x))


def noted(size: int, rounds: int, explained: float, forward: float) -> dict[str, float]:
    """What is kept of one size."""
    times = {"ms": 1e3 * explained, "forward ms": 1e3 * forward, "ratio": explained / forward}
    return {"size": size, "rounds": rounds, **times}


def long_run(model: nn.Module, forwards: Forwards, count: int, settings: Settings) -> dict[str, float]:
    """Many images, one batch after another, timed as a whole; the last batch may be smaller."""
    x, target = images(ROW, settings.side)
    sizes = [ROW] * (count // ROW) + [count % ROW] * (count % ROW > 0)
    calls = {
        n: forwards.of(x[:n]) | {"it": partial(relprop.explain, model, x[:n], target[:n])} for n in sorted({*sizes})
    }
    for each in calls.values():
        in_turns(each, 1)
    rounds = max(1, min(settings.rounds, 50 // count))
    names = next(iter(calls.values()))
    best = in_turns({name: lambda name=name: [calls[n][name]() for n in sizes] for name in names}, rounds, warmup=0)
    return noted(count, rounds, best["it"] / count, faster(best) / count)


def table(data: dict[str, Any]) -> str:
    """A table for each thing that it grows with."""
    parts = []
    for name, head in HEADS.items():
        lines = [[head, "ms an image", "forward, ms an image", "x forward", "best of"]]
        for at in data["series"][name]:
            cells = [f"{at['size']:,}", f"{at['ms']:.0f}", f"{at['forward ms']:.1f}", f"{at['ratio']:.2f}"]
            lines.append([*cells, str(at["rounds"])])
        parts.append(markdown(lines))
    side = data["side"]
    said = (
        f"`paper` on ResNet-50, {side}x{side} unless said otherwise, in turns with both forward passes after a warm-up:"
    )
    return "\n\n".join([said, *parts])
