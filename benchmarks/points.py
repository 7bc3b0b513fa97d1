"""How much fewer points of insertion and deletion curves change their areas, on real maps of a real ResNet-50.

Measures curves of 101 points and adaptive ones, map by map, into a file of curves, and continues there when started
again; curves of 26 points are every fourth point of the former. Then writes the rows and the manifest, and prints the
tables of results/points/README.md.
"""

import argparse
import csv
import datetime
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import relprop
from relprop import datasets, methods
from relprop.datasets import Sample
from relprop.memory import keep_freed
from relprop.metrics import Scores
from relprop.metrics.curves import ALL, BOUND, PER_ROUND, START
from relprop.metrics.scorer import Probabilities, fastest

METHODS = ("paper", "released+hq-released", "grad-cam", "guided-backprop", "random")
PARTS = {"calibration": 24, "validation": 12}  # images that the adaptive mode was calibrated on, and others
KINDS = ("insertion", "deletion")
PUBLISHED = 4  # images that are measured by the published protocol too
SEED = 0  # of the choice of images, and of the order of tied pixels

Row = dict[str, Any]
"""A map under a protocol: its image and which part that is of, its method, areas by kind and points, and their cost."""


# -- Measuring ---------------------------------------------------------------------------------------------------------


def jobs(samples: Sequence[Sample], points: Sequence[str]) -> Iterator[tuple[Sample, str, str, str]]:
    """Yield what is measured: an image, a method, a protocol and the points; the dense curves first."""
    for count in points:
        for index, sample in enumerate(samples):
            for method in METHODS:
                yield sample, method, "tie-safe", count
                if index < PUBLISHED and count == "101":
                    yield sample, method, "otsuki2024", count


def measure(
    model: relprop.Model, sample: Sample, method: str, protocol: str, points: str, scorer: Probabilities
) -> Scores:
    """Explain one image and score its map: for the predicted class, or the true one under the published protocol."""
    x = model.prepare(sample.path)[None]
    target = scorer(x).argmax(1)
    maps = methods.get(method)(model, x, target)
    if protocol == "otsuki2024":
        ask: dict[str, Any] = {"protocol": protocol, "scored": sample.label}
    else:
        ask = {"seeds": [SEED], "target": target, "points": int(points) if points.isdigit() else points}
    if protocol != "otsuki2024" or methods.get(method).family != "captum":  # published: those by their first channel
        maps = maps.sum(1, keepdim=True)
    ticket = int(sample.key[:12], 16)
    return relprop.insertion_deletion(model, x, maps, indices=[ticket], scorer=scorer, batch_size=8, **ask)


def read(path: Path) -> list[dict[str, Any]]:
    """What has been measured so far; a line that was cut off is measured again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def key(line: dict[str, Any]) -> tuple[str, ...]:
    """What a line is known by."""
    return line["image"], line["method"], line["protocol"], line["points"]


def run(data: Path, points: Sequence[str], curves: Path) -> dict[str, Any]:
    """Measure whatever is lacking; return what is needed to do it again."""
    every = datasets.open(data)
    first = {sample.name for sample in every.limit(PARTS["calibration"], SEED)}
    chosen = sorted(every.limit(sum(PARTS.values()), SEED), key=lambda sample: sample.name not in first)
    done = {key(line) for line in read(curves)}
    wanted = [job for job in jobs(chosen, points) if (job[0].name, *job[1:]) not in done]
    model = relprop.load("resnet50", weights="keras")
    scorer = fastest(model, torch.stack([model.prepare(sample.path) for sample in chosen[:4]]))
    curves.parent.mkdir(parents=True, exist_ok=True)
    with curves.open("a") as file:
        for i, (sample, method, protocol, count) in enumerate(wanted):
            scores = measure(model, sample, method, protocol, count, scorer)
            part = "calibration" if sample.name in first else "validation"
            line = {"image": sample.name, "method": method, "protocol": protocol, "points": count, "part": part}
            line |= {"forwards": scores.forwards}
            for kind in KINDS:
                fraction, probability = (values[0].tolist() for values in getattr(scores.curves, kind))
                line[kind] = {"fraction": fraction, "probability": probability, "area": float(getattr(scores, kind))}
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(f"{i + 1} of {len(wanted)}: {sample.name} {method} {protocol} {count}", file=sys.stderr, flush=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return {
        "command": f"python benchmarks/points.py {data.name}",
        "finished": str(datetime.date.today()),
        "source": str(model.source),
        "weights": digest.hexdigest(),
        "data": data.name,
        "images": PARTS,
        "seed": SEED,
        "methods": METHODS,
        "adaptive": {"all": ALL, "start": START, "per round": PER_ROUND, "bound": BOUND},
        "engine": scorer.engine,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("relprop", "torch", "torchvision", "captum", "numpy", "pillow")},
    }


def rows(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """A row a map: the areas of its 101 points, of every fourth of them, and of the adaptive ones if they are there."""
    known = {key(line): line for line in lines}
    found = []
    for line in lines:
        if line["points"] != "101":
            continue
        row = {name: line[name] for name in ("image", "part", "method", "protocol")}
        adaptive = known.get((*key(line)[:3], "adaptive"), {})
        for kind in KINDS:
            dense = line[kind]
            some = np.trapezoid(dense["probability"][::4], dense["fraction"][::4])
            row |= {f"{kind} 101": f"{dense['area']:.6f}", f"{kind} 26": f"{some:.6f}"}
            row[f"{kind} adaptive"] = f"{adaptive[kind]['area']:.6f}" if adaptive else ""
        row |= {"forwards 101": line["forwards"], "forwards adaptive": adaptive.get("forwards", "")}
        found.append(row)
    return found


# -- Tables ------------------------------------------------------------------------------------------------------------


def differences(some: Sequence[Row], points: str) -> dict[str, np.ndarray]:
    """By how much fewer points change insertion, deletion and their difference, map by map."""
    change = {kind: np.array([float(r[f"{kind} {points}"]) - float(r[f"{kind} 101"]) for r in some]) for kind in KINDS}
    return change | {"ID": change["insertion"] - change["deletion"]}


def table(some: Sequence[Row], points: str) -> str:
    """Mean, 95th percentile and largest of the differences, and for adaptive points their share of the forwards."""
    share = points == "adaptive"
    heads = [f"{what} {of}" for what in (*KINDS, "ID") for of in ("mean", "95 %", "max")]
    heads = ["method", "maps", *(["forwards"] if share else []), *heads]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for method in (*METHODS, "all"):
        mine = [row for row in some if method in (row["method"], "all")]
        cells = [method, str(len(mine))]
        if share:
            cells.append(f"{np.mean([float(r['forwards adaptive']) / float(r['forwards 101']) for r in mine]):.3f}")
        for change in differences(mine, points).values():
            size = np.abs(change)
            cells += [f"{change.mean():+.4f}", f"{np.quantile(size, 0.95):.4f}", f"{size.max():.4f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tables(found: Sequence[Row]) -> dict[str, str]:
    """The tables of the page, by what they show."""
    shown = {
        "26 points less 101, tie-safe": ("26", [*PARTS], "tie-safe"),
        "26 points less 101, published protocol": ("26", [*PARTS], "otsuki2024"),
        "Adaptive points less 101, tie-safe, validation images": ("adaptive", ["validation"], "tie-safe"),
        "Adaptive points less 101, tie-safe, calibration images": ("adaptive", ["calibration"], "tie-safe"),
    }
    made = {}
    for title, (points, parts, protocol) in shown.items():
        mine = [row for row in found if row["part"] in parts and row["protocol"] == protocol]
        if mine := [row for row in mine if row[f"insertion {points}"]]:
            made[title] = table(mine, points)
    return made


def main() -> None:
    """Measure what is lacking, write the rows and the manifest, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder of ImageNet's validation images")
    parser.add_argument("--points", default="101,adaptive", help="which curves; 101 alone to calibrate with")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--curves", type=Path, default=Path("runs/points/curves.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("results/points"))
    args = parser.parse_args()
    keep_freed()
    torch.set_num_threads(args.threads)
    manifest = run(args.data, args.points.split(","), args.curves)
    found = rows(read(args.curves))
    manifest["rows"] = len(found)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for title, text in tables(found).items():
        print(f"\n{title}:\n\n{text}")


if __name__ == "__main__":
    main()
