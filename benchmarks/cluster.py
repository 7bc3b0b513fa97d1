"""How a study grows with workers: the same pieces in this process, with one worker and with two, in one run.

``python benchmarks/cluster.py`` prints Markdown; docs/scale.md says how to read it, and has what came out. Leave the
machine alone meanwhile: two workers want two cores. ``--quick`` shows that it runs; its figures mean nothing.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import relprop
from relprop.cluster import Cluster
from relprop.memory import keep_freed
from relprop.study import Journal, Progress, Row, evaluate, pieces
from relprop.study.request import Request

METHODS = ["paper", "grad-cam", "random"]
METRICS = ["insertion-deletion"]


@dataclass
class Clock:
    """Takes the time from the first piece that is done to the last."""

    begin: float = 0.0
    first: tuple[float, float] | None = None
    last: tuple[float, float] = (0.0, 0.0)

    def __call__(self, progress: Progress) -> None:
        now = time.perf_counter(), progress.done
        if progress.fresh and self.first is None:
            self.first = now
        self.last = now

    @property
    def pace(self) -> float:
        """Images a second, once it is under way."""
        assert self.first is not None
        return (self.last[1] - self.first[1]) / (self.last[0] - self.first[0])


def photos(folder: Path, count: int) -> Path:
    """Coloured noise, smooth enough for a JPEG to be of the usual size."""
    draw = np.random.default_rng(0)
    for i in range(count):
        small = draw.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(small).resize((500, 400), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.jpg")
    return folder


def driver(rows: int) -> float:
    """Rows a second that the driver's journal takes in, as pieces of eight images and four methods bring them."""
    curve = [round(i / 26, 5) for i in range(26)]
    curves = dict.fromkeys(("insertion", "insertion fraction", "deletion", "deletion fraction"), curve)
    numbers = dict.fromkeys(("insertion", "deletion", "score", "spread", "score of the true class"), 0.1234567890123)
    made = [
        Row(f"{i:032x}", f"n0/{i}.jpg", 1, 1, "paper", "insertion-deletion", "tie-safe", numbers, curves)
        for i in range(rows)
    ]
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.sqlite") as journal:
        begin = time.perf_counter()
        for i in range(0, rows, 64):
            journal.add(made[i : i + 64])
            journal.mark(f"{i}", [row.key for row in made[i : i + 64]], [])
        return rows / (time.perf_counter() - begin)


def main(quick: bool) -> None:
    """Measures, and prints."""
    # Nobody is told, and nothing is called but this machine.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    paths = [str(Path(relprop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    import ray

    keep_freed()
    torch.set_num_threads(1)
    name, images, size = ("resnet18", 8, 2) if quick else ("resnet50", 16, 2)
    asked: dict[str, Any] = {"points": 3 if quick else 5, "seeds": 1}
    model = relprop.load(name, weights="random")
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = photos(Path(folder), images)
        ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
        engines = {"this process": None, "1 worker": Cluster(workers=1), "2 workers": Cluster(workers=2)}
        for label, engine in engines.items():
            clock = Clock(time.perf_counter())
            study = evaluate(model, data, METHODS, METRICS, batch_size=size, progress=clock, engine=engine, **asked)
            assert not study.failures
            found[label] = clock.pace, clock.last[0] - clock.begin
        ray.shutdown()
        request = Request.of(model, data, METHODS, METRICS, "tie-safe", None, 0, None, size, "float32", asked)
    forwards = sum(pieces.forwards(method, request.run.wanted) for method in request.run.named) + 1
    alone = found["1 worker"][0]
    print(f"{name}, {images} images in batches of {size}, {', '.join(METHODS)}: {forwards:g} forward passes an image\n")
    print("|  | images/s | forwards/s | to one worker | all of it, start included |\n|---|---:|---:|---:|---:|")
    for label, (pace, seconds) in found.items():
        print(f"| {label} | {pace:.3g} | {pace * forwards:.3g} | {pace / alone:.2f} | {seconds:.0f} s |")
    print(f"\nThe driver's journal takes in {driver(2_000 if quick else 20_000):,.0f} rows/s.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller network, a few images: does it run?")
    main(parser.parse_args().quick)
