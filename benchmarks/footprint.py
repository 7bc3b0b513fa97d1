"""Memory: what an explanation needs beside what a forward pass keeps for gradients, and that it does not grow.

Each figure is taken in a process of its own.
"""

import math
import multiprocessing
import os
import re
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from subject import images, resnet, verdict
from torch import Tensor

import relprop
from relprop.reproduction.tables import markdown

BAR = 1.3
WAYS: dict[str, dict[str, Any]] = {"`paper`": {}, "`paper`, `recompute=True`": {"recompute": True}}
"""What `relprop.explain` is asked for, by name; the first is judged."""

# With a fixed threshold every buffer is mapped for itself and unmapped when it is freed: what is resident is in use.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    side: int = 224
    batch: int = 8
    images: int = 300  # explained in a row
    every: int = 50  # images between two lines of the table


QUICK = Settings(side=32, images=6, every=2)


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure, each in a process of its own."""
    return {
        "batch": settings.batch,
        "side": settings.side,
        "activations": fresh(activations, settings),
        "peaks": {name: fresh(peak, settings, ask, env=MAPPED) for name, ask in WAYS.items()},
        "row": fresh(in_a_row, settings),
    }


def fresh(function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Any:
    """Call a function in a new process, with more in its environment."""
    before = dict(os.environ)
    os.environ.update(env or {})
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(torch.set_num_threads, torch.get_num_threads()).result()
            return pool.submit(function, *args).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def activations(settings: Settings) -> float:
    """Megabytes that a forward pass keeps for gradients: memory of saved tensors, each counted once, no parameters."""
    model = resnet().requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        memory = t.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = model(images(settings.batch, settings.side)[0])
    assert output.requires_grad  # all that is kept is alive until here, so no address was used twice
    return sum(kept.values()) / 1e6


def peak(settings: Settings, ask: dict[str, Any]) -> float:
    """Megabytes that one call adds, at its highest, to what was resident before it; nan where there is no /proc."""
    if not RESET.exists():
        return float("nan")
    model = resnet()
    x, target = images(settings.batch, settings.side)
    for _ in range(2):  # which traces, plans and packs weights
        relprop.explain(model, x, target, preset="paper", **ask)
    before = status("VmRSS")
    RESET.write_text("5")  # the high-water mark starts anew
    relprop.explain(model, x, target, preset="paper", **ask)
    return status("VmHWM") - before


def in_a_row(settings: Settings) -> list[dict[str, float]]:
    """Explain different images one by one; what is resident, and the most that was so far."""
    model = resnet()
    lines = []
    for count in range(1, settings.images + 1):
        relprop.explain(model, *images(1, settings.side, seed=count), preset="paper")
        if count % settings.every == 0:
            lines.append({"images": count, "resident": status("VmRSS"), "peak": highest()})
    return lines


def status(name: str) -> float:
    """Megabytes, of what the system says about this process; nan where there is no /proc."""
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) * 1024 / 1e6 if found else float("nan")


def highest() -> float:
    """The most that it ever held; of ru_maxrss, which Linux lets it inherit, only where there is no /proc: macOS."""
    held = status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 if math.isnan(held) else held


def table(data: dict[str, Any]) -> str:
    """The peak beside the activations, the verdict, and the long run."""
    kept = data["activations"]
    lines = [[f"batch {data['batch']}, {data['side']}x{data['side']}", "MB", "x activations"]]
    lines.append(["activations that a forward pass keeps for gradients", f"{kept:.0f}", "1.00"])
    lines += [[f"peak of {name}", f"{mb:.0f}", f"{mb / kept:.2f}"] for name, mb in data["peaks"].items()]
    name, first = next(iter(data["peaks"].items()))
    row = [["images explained one by one", "resident MB", "peak MB", "growth of the peak, MB"]]
    for at in data["row"]:
        growth = at["peak"] - data["row"][0]["peak"]
        row.append([str(at["images"]), f"{at['resident']:.0f}", f"{at['peak']:.0f}", f"{growth:.1f}"])
    word = verdict(f"peak of {name}", first / kept, BAR, data, " of the activations")
    return "\n\n".join([markdown(lines), word, markdown(row)])
