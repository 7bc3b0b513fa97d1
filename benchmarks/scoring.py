"""What measuring maps costs, counted in plain forward passes."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from subject import in_turns, verdict, word
from torch import Tensor

import relprop
from relprop import methods
from relprop.images import PHOTO
from relprop.memory import keep_freed
from relprop.metrics.scorer import fastest
from relprop.reproduction.tables import markdown

MAP = 202  # forward passes of two curves of 101 points
SCORE_CAM = 2048  # and of Score-CAM on a ResNet-50, one a feature map
BATCH = 8

ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "101 points": ({"points": 101}, 0.8),
    "26 points": ({"points": 26}, 0.22),
    "adaptive points": ({"points": "adaptive"}, 0.3),
    "101 points, quantised map, block ties": ({"points": 101, "ties": "block"}, 0.1),
}
"""How a map is scored, and the most that it may cost."""
SCORE_CAM_BAR, STUDY_BAR = 0.75, 0.9


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    model: str = "resnet50"
    weights: str = "keras"  # real ones: where a curve bends, and which feature maps are dead, is a matter of them
    size: int = 224
    rounds: int = 3
    images: int = 16  # of the study
    points: int = 26
    threads: int = 2


QUICK = Settings(model="resnet18", weights="random", size=32, rounds=1, images=2, points=3, threads=1)


def measure(settings: Settings) -> dict[str, Any]:
    """Time every way to score a map, in turns with the forward passes; and a study."""
    keep_freed()  # for the plain passes too: the command line does it, and everything gains from it
    model = relprop.load(settings.model, weights=settings.weights)
    x = F.interpolate(model.prepare(PHOTO)[None], (settings.size, settings.size))
    scorer = fastest(model, x.expand(BATCH, -1, -1, -1))
    target = scorer(x).argmax(1)
    heatmap = relprop.explain(model, x, target=target, preset="paper").heatmap
    quantised = relprop.heat_quantization(heatmap, edges="released")

    def scored(ask: dict[str, Any]) -> Callable[[], Any]:
        chosen = quantised if "ties" in ask else heatmap
        return lambda: relprop.insertion_deletion(
            model, x, chosen, target, seeds=1, scorer=scorer, batch_size=BATCH, **ask
        )

    plain = passes(model, x, MAP)
    runs = {name: scored(ask) for name, (ask, _) in ROWS.items()}
    forwards = {name: run().forwards for name, run in runs.items()}
    best = in_turns({"plain": plain, **runs}, settings.rounds, warmup=0)  # counting was their warm-up
    method = methods.get("score-cam")
    cam_calls = {"before": plain, "cam": lambda: method(model, x, target, scorer=scorer), "after": plain}
    cam = in_turns(cam_calls, 1, warmup=0)
    return {
        "rounds": settings.rounds,
        "weights": str(model.source),
        "plain": best["plain"],
        "rows": {name: {"forwards": forwards[name], "seconds": best[name]} for name in ROWS},
        "score-cam": cam["cam"] / (min(cam["before"], cam["after"]) * SCORE_CAM / MAP),
        "engine": scorer.engine,
        "study": study_speed(settings),
    }


def table(data: dict[str, Any]) -> str:
    """The ways to score beside each other, and the verdicts."""
    plain = data["plain"]
    lines = [["", "images scored", "seconds", f"x {MAP} forwards", "bar", "verdict"]]
    lines.append([f"{MAP} plain forward passes", str(MAP), f"{plain:.2f}", "1.00", "", ""])
    for name, (_, bar) in ROWS.items():
        found = data["rows"][name]
        ratio = found["seconds"] / plain
        cells = [name, str(found["forwards"]), f"{found['seconds']:.2f}", f"{ratio:.2f}", f"<= {bar}"]
        lines.append([*cells, word(ratio <= bar, data)])
    head = f"Best of {data['rounds']} taken in turns with plain forward passes in batches of {BATCH}; "
    said = [f"{head}{data['weights']}.", "", markdown(lines), ""]
    cam = data["score-cam"]
    said.append(verdict(f"Score-CAM, scorer passed, of {SCORE_CAM} forwards (by {MAP})", cam, SCORE_CAM_BAR, data))
    said.append(f"- the scorer's engine: {data['engine']}")
    if data["study"] is None:
        said.append("- a study beside two processes: needs Linux and two cores")
    else:
        speed, ratio = data["study"]["images a second"], data["study"]["ratio"]
        beside = f"{speed:.2f} images a second, {ratio:.2f} of two processes, a thread and a core each"
        said.append(f"- a study: {beside}, bar >= {STUDY_BAR}: {word(ratio >= STUDY_BAR, data)}")
    return "\n".join(said)


def passes(model: relprop.Model, x: Tensor, count: int) -> Callable[[], Any]:
    """So many eager forward passes without gradients, in batches."""
    images = x.expand(count, -1, -1, -1).contiguous()

    def run() -> None:
        with torch.no_grad():
            for part in images.split(BATCH):
                model.module(part)

    return run


def study_speed(settings: Settings) -> dict[str, float] | None:
    """Compare a study's throughput with that of two processes that share nothing, each with a core of its own."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        halves = [Path(folder, name) for name in ("0", "1")]
        for i, photo in enumerate(photos(settings.images)):
            halves[i % 2].mkdir(exist_ok=True)
            photo.save(halves[i % 2] / f"{i}.png")
        runs = {
            "study": lambda: studies([(Path(folder), cores, settings.threads)], settings),
            "two": lambda: studies([(half, [core], 1) for half, core in zip(halves, cores, strict=False)], settings),
        }
        seconds = dict.fromkeys(runs, float("inf"))
        for _ in range(min(2, settings.rounds)):
            for name, run in runs.items():
                seconds[name] = min(seconds[name], run())
    ratio = seconds["two"] / seconds["study"]
    return {"images a second": settings.images / seconds["study"], "ratio": ratio}


def photos(count: int) -> Iterator[Image.Image]:
    """Different crops of the bundled photo."""
    with Image.open(PHOTO) as opened:
        photo = opened.convert("RGB")
    for i in range(count):
        yield photo.crop((i, i, photo.width - i, photo.height - i))


def studies(parts: list[tuple[Path, list[int], int]], settings: Settings) -> float:
    """Run a study of each folder in a process of its own; return the seconds until the last is done."""
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Barrier(len(parts), timeout=600), spawn.Queue()
    started = [spawn.Process(target=study, args=(*part, settings, ready, done)) for part in parts]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise RuntimeError("A study has failed; its own error is above.")
    return max(done.get() for _ in started)


def study(folder: Path, cores: list[int], threads: int, settings: Settings, ready: Any, done: Any) -> None:
    """What `relprop evaluate` does, timed from when all is loaded and every process is ready."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    keep_freed()
    model = relprop.load(settings.model, weights=settings.weights)
    ask: dict[str, Any] = {"points": settings.points, "seeds": 1, "batch_size": BATCH}
    relprop.evaluate(model, folder, limit=1, **ask)  # which measures the engines, too
    ready.wait()
    begin = time.perf_counter()
    relprop.evaluate(model, folder, **ask)
    done.put(time.perf_counter() - begin)
