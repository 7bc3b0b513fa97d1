"""What an explanation of ResNet-50 costs in eager forward passes, beside other libraries."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peers import PEERS, Run
from subject import LAST, PLAIN, Forwards, faster, images, in_turns, resnet, verdict
from torch import nn

import relprop
from relprop.memory import keep_freed
from relprop.reproduction.tables import markdown

PAPER, EPSILON, FURTHER = "**relprop** `paper`", "**relprop** `epsilon`", "**relprop** each further target"
DEFAULT = "**relprop** `relprop`, the default"
RECOMPUTED = f"{PAPER}, `recompute=True`"
BARS = {(PAPER, 1): 3.2, (PAPER, 8): 2.9, (PAPER, 32): 2.9, (EPSILON, 8): 2.0, (FURTHER, 1): 1.1, (FURTHER, 8): 1.1}
BARS |= dict.fromkeys([(DEFAULT, 1), (DEFAULT, 8), (DEFAULT, 32)], 3.5)
"""The most forward passes that a method may cost at a batch size."""
TARGETS = 5


@dataclass(frozen=True)
class Settings:
    """How much is run: rounds by batch size."""

    rounds: dict[int, int] = field(default_factory=lambda: {1: 24, 8: 16, 32: 6})
    side: int = 224
    warmup: int = 2


QUICK = Settings({1: 1, 8: 1}, side=32, warmup=0)


def ours(model: nn.Module, **ask: Any) -> Run:
    """A preset of relprop's, with its ledger as always."""
    return lambda x, target: relprop.explain(model, x, target=target, **ask)


OURS: dict[str, Callable[[nn.Module], Run]] = {
    DEFAULT: ours,
    PAPER: partial(ours, preset="paper"),
    RECOMPUTED: partial(ours, preset="paper", recompute=True),
    EPSILON: partial(ours, preset="epsilon"),
}

LARGEST = 8
"""The batch up to which other libraries are timed: at 32, captum and zennit need more than 20 GB with buffers kept."""

NAMES = (DEFAULT, PAPER, RECOMPUTED, EPSILON, FURTHER, *PEERS)
"""The rows of the table."""


def measure(settings: Settings) -> dict[str, Any]:
    """Time every method on every device that there is."""
    keep_freed()  # for the forward passes and for every library
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        "rounds": {str(batch): rounds for batch, rounds in settings.rounds.items()},
        "side": settings.side,
        "devices": {device: rows(device, settings) for device in devices},
    }


def rows(device: str, settings: Settings) -> list[dict[str, Any]]:
    """Time the methods on one device: a row for each of them and each batch size, milliseconds and forward passes.

    All of ours take turns with the forward passes together, the other libraries one by one: their buffers are large.
    """
    model = resnet(device=device)
    forwards = Forwards(model)
    one, several = (
        ours(copy.deepcopy(model), preset="paper") for _ in range(2)
    )  # each keeps weights for its own shape
    found: list[dict[str, Any]] = []

    def add(batch: int, calls: dict[str, Any], costs: Callable[[dict[str, float]], dict[str, float]]) -> None:
        best = in_turns(forwards.of(x) | calls, settings.rounds[batch], settings.warmup, device)
        beside = {PLAIN: 1e3 * best[PLAIN], LAST: 1e3 * best[LAST]}
        for name, cost in costs(best).items():
            found.append({"name": name, "batch": batch, "ms": 1e3 * cost, "ratio": cost / faster(best)} | beside)

    own = {name: build(model) for name, build in OURS.items()}
    for batch in settings.rounds:
        x, target = images(batch, settings.side, device=device)
        calls: dict[str, Any] = {name: partial(method, x, target) for name, method in own.items()}
        if (FURTHER, batch) in BARS:
            many = images(batch, settings.side, TARGETS, device)[1]
            calls |= {"one": partial(one, x, many[:, :1]), "all": partial(several, x, many)}
        add(batch, calls, own_costs)
    for name, build in PEERS.items():
        method = build(model)
        for batch in (b for b in settings.rounds if b <= LARGEST):
            x, target = images(batch, settings.side, device=device)
            add(batch, {name: partial(method, x, target)}, lambda best, name=name: {name: best[name]})
        del method
        gc.collect()  # captum's hooks hold on to activations
    return found


def own_costs(best: dict[str, float]) -> dict[str, float]:
    """Seconds of our methods, and of a further target where several were asked for."""
    further = {FURTHER: (best["all"] - best["one"]) / (TARGETS - 1)} if "all" in best else {}
    return {name: best[name] for name in OURS} | further


def table(data: dict[str, Any]) -> str:
    """The costs beside each other, and the verdicts."""
    return "\n\n".join(device_table(device, found, data) for device, found in data["devices"].items())


def device_table(device: str, found: list[dict[str, Any]], data: dict[str, Any]) -> str:
    """The same of one device; a forward pass' time is the best over all turns, a ratio is to those of its own turns."""
    batches = [int(batch) for batch in data["rounds"]]
    lines = [["", *[head for batch in batches for head in (f"batch {batch}: ms", "x forward")]]]
    best = {(name, b): min(r[name] for r in found if r["batch"] == b) for name in (PLAIN, LAST) for b in batches}
    for name in (PLAIN, LAST):
        cells = [(best[name, b], best[name, b] / min(best[PLAIN, b], best[LAST, b])) for b in batches]
        lines.append([f"forward, {name}", *[cell for ms, ratio in cells for cell in (f"{ms:.0f}", f"{ratio:.2f}")]])
    by_name = {name: {r["batch"]: r for r in found if r["name"] == name} for name in NAMES}
    for name, mine in by_name.items():
        cells = [(f"{mine[b]['ms']:.0f}", f"{mine[b]['ratio']:.2f}") if b in mine else ("", "") for b in batches]
        lines.append([name, *[cell for pair in cells for cell in pair]])
    rounds = ", ".join(f"{count} at batch {batch}" for batch, count in data["rounds"].items())
    head = f"ResNet-50, {data['side']}x{data['side']}, float32, {device.upper()}; best of {rounds}:"
    judged = [(name, b, bar) for (name, b), bar in BARS.items() if b in batches]
    fastest = {b: min(best[PLAIN, b], best[LAST, b]) for b in batches}
    verdicts = []
    for name, b, bar in judged:
        label, ratio, strict = f"{name} at batch {b}", by_name[name][b]["ratio"], by_name[name][b]["ms"] / fastest[b]
        if ratio <= bar < strict:  # slow forward passes in its own turns are no merit
            label, ratio = f"{label}, to the fastest forward pass of the run", strict
        verdicts.append(verdict(label, ratio, bar, data))
    return "\n".join([head, "", markdown(lines), "", *verdicts])
