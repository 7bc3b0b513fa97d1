"""The verb of comparison for a shell: several methods on one image, as pictures and as numbers."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, SOME_FAILED, load_model, stderr

if TYPE_CHECKING:
    from PIL.Image import Image

    from relprop.compare import Comparison, Progress
    from relprop.zoo import Model

FILES = ("grid.png", "curves.png", "scores.csv", "curves.csv", "maps.npz", "manifest.json")


def compare(
    image: Annotated[Path | None, typer.Argument(metavar="IMAGE", show_default="the bundled photo of a cat")] = None,
    model: Annotated[str, typer.Option(help="As for explain.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="As for explain.")] = "auto",
    classes: Annotated[Path | None, typer.Option(help="As for explain.")] = None,
    methods: Annotated[
        str, typer.Option(help="Names that `relprop methods` lists, with commas between.")
    ] = "relprop,released+hq-released,grad-cam,integrated-gradients,random",
    target: Annotated[
        str, typer.Option(help="The class to explain: predicted, an index, a synset or a name.")
    ] = "predicted",
    true: Annotated[
        str | None, typer.Option(help="The true class, which the published protocol scores.", show_default="the target")
    ] = None,
    points: Annotated[
        int | None, typer.Option(min=2, help="Points of a curve; by default 26, and the 101 that were published.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Random orders in which tied pixels are taken.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the results.", show_default="compare/ with the image's name")
    ] = None,
) -> int:
    """Compare methods on one image: overlays, scores and curves.

    \b
    relprop compare photo.jpg
    relprop compare photo.jpg --methods paper,grad-cam,rise --out results
    relprop compare photo.jpg --target tabby --true "tiger cat" --points 26

    OUT gets grid.png (the photo and an overlay for each method, with its scores), curves.png (insertion and deletion),
    the numbers of both as scores.csv and curves.csv, maps.npz, and a manifest. Every map is scored under the published
    protocol and under the tie-safe one; a method that fails is named, and the others are done.
    """
    from relprop.compare import compare as run
    from relprop.figure import workplace
    from relprop.images import PHOTO, names, read
    from relprop.memory import keep_freed
    from relprop.methods import get

    keep_freed()
    wanted = [get(name.strip()) for name in methods.split(",")]
    path = image or PHOTO
    picture, digest = read(path), hashlib.sha256(path.read_bytes()).hexdigest()
    folder = out or Path("compare", *names([path]))
    with workplace(folder) as work:
        net = load_model(model, weights, classes)
        explained = None if target == "predicted" else net.find_class(target)
        label = None if true is None else net.find_class(true)
        x = net.prepare(picture)[None]
        with _bar() as progress:
            comparison = run(net, x, wanted, explained, true=label, points=points, seeds=seeds, progress=progress)
        for name, reason in comparison.failures.items():
            typer.echo(f"error: {name}: {reason}", err=True)
        if not comparison.methods:
            raise RelpropError("No method could explain the image, so nothing was written.")
        about = {"model": model, "weights": asdict(net.source), "preparation": str(net.preparation)}
        about["image"] = {"path": str(path), "sha256": digest}
        about["methods"] = {m.name: {**m.options, "citation": m.citation} for m in wanted}
        _write(work, comparison, net, net.crop(picture), about)
        for name in FILES:
            (work / name).replace(folder / name)
    typer.echo(_table(comparison))
    typer.echo(f"\n{_scored(comparison, net)}\nIn {folder}: {', '.join(FILES)}.")
    return SOME_FAILED if comparison.failures else DONE


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on stderr, where that is a terminal."""
    from rich.progress import Progress as Bar
    from rich.progress import TimeRemainingColumn

    columns = (*Bar.get_default_columns()[:2], TimeRemainingColumn())
    with Bar(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda part, doing: bar.update(task, completed=part, description=doing)


def _write(work: Path, comparison: Comparison, net: Model, photo: Image, about: Mapping[str, Any]) -> None:
    """Writes everything into a folder, the manifest last."""
    import numpy as np
    from PIL import Image

    from relprop.compare import PROTOCOLS
    from relprop.compare_figure import curves, grid
    from relprop.study.manifest import command, surroundings

    true = "" if comparison.true is None else _name(net, comparison.true)
    Image.fromarray(grid(comparison, photo, _name(net, comparison.target), true)).save(work / "grid.png")
    Image.fromarray(curves(comparison)).save(work / "curves.png")
    _write_csv(work / "scores.csv", comparison.rows())
    _write_csv(work / "curves.csv", comparison.points())
    arrays: dict[str, Any] = {method: values.numpy() for method, values in comparison.maps.items()}
    np.savez_compressed(work / "maps.npz", **arrays)
    manifest = {
        "command": command(),
        **about,
        "target": {
            "class": comparison.target,
            "name": _name(net, comparison.target),
            "probability": comparison.probability,
        },
        "scored": {
            protocol: {"class": comparison.scored(protocol), "name": _name(net, comparison.scored(protocol))}
            for protocol in PROTOCOLS
        },
        "settings": comparison.settings,
        "failures": comparison.failures,
        **surroundings(),
        "files": {name: hashlib.sha256((work / name).read_bytes()).hexdigest() for name in FILES[:-1]},
    }
    text = json.dumps(manifest, indent=2, default=str)
    (work / FILES[-1]).write_text(f"{text}\n", encoding="utf-8")


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    first, *others = rows
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerows([first, *others])


def _name(net: Model, index: int) -> str:
    return net.classes[index] if net.classes else f"class {index}"


def _table(comparison: Comparison) -> str:
    """The scores, for a person."""
    from relprop.compare import PROTOCOLS

    wide = max(len("method"), *map(len, comparison.methods))
    columns = f"{'ID':>8} {'insertion':>9} {'deletion':>8}"
    lines = [f"{'':<{wide}}" + "".join(f"  {name:>{len(columns)}}" for name in PROTOCOLS.values())]
    lines.append(f"{'method':<{wide}}" + f"  {columns}" * len(PROTOCOLS))
    for method in comparison.methods:
        lines.append(f"{method:<{wide}}")
        for protocol in PROTOCOLS:
            numbers = [comparison.number(method, protocol, n) for n in ("score", "insertion", "deletion")]
            lines[-1] += "  {:>8.3f} {:>9.3f} {:>8.3f}".format(*(round(n, 3) + 0.0 for n in numbers))  # no -0.000
    return "\n".join(lines)


def _scored(comparison: Comparison, net: Model) -> str:
    """What the scores are of."""
    target = f"{_name(net, comparison.target)} ({comparison.target}, {100 * comparison.probability:.0f} %)"
    if comparison.true is None:
        return f"Explained, and scored under both protocols: {target}. --true names a true class for the published one."
    true = f"{_name(net, comparison.true)} ({comparison.true})"
    return f"Explained, and scored by the tie-safe protocol: {target}; scored by the published one: {true}."
