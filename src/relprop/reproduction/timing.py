"""Timing: what an explanation costs beside the forward pass that it explains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relprop import engine, requests
from relprop.reproduction.claims import EXPLAINED_MS, FORWARD_MS
from relprop.reproduction.tables import markdown

BATCHES, TURNS = (1, 8), 7


def measure(model: Any, x: Tensor) -> list[dict[str, float]]:
    """Milliseconds an image, the best of several in turns after a warm-up."""
    module = requests.module(model)
    rows = []
    for size in BATCHES:
        batch = x[:1].expand(size, *x.shape[1:]).contiguous()
        runs: dict[str, Callable[[], Any]] = {
            "forward": torch.no_grad()(partial(module, batch)),
            "explained": partial(engine.explain, model, batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(1 + TURNS):
            for name, run in runs.items():
                seconds[name].append(_seconds(run))
        rows.append({"batch": size} | {name: 1e3 * min(times[1:]) / size for name, times in seconds.items()})
    return rows


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def write(rows: list[dict[str, float]], path: Path) -> None:
    """Writes the times, with the machine's threads."""
    path.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")


def table(path: Path) -> str:
    """Times beside the paper's; only the ratio can be compared."""
    measured = json.loads(path.read_text())
    lines = [["", "forward, ms", "forward + explanation, ms", "ratio"]]
    lines += [
        ["paper, a GPU, one image", f"{FORWARD_MS:.2f}", f"{EXPLAINED_MS:.1f}", f"{EXPLAINED_MS / FORWARD_MS:.1f}"]
    ]
    for row in measured["rows"]:
        label = f"here, {measured['threads']} CPU threads, batch {row['batch']}"
        ratio = row["explained"] / row["forward"]
        lines.append([label, f"{row['forward']:.1f}", f"{row['explained']:.1f}", f"{ratio:.1f}"])
    return markdown(lines)
