"""The verb that reports: one HTML file about an explanation or a comparison, for any browser."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, load_model


def report(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_IMAGE", help="What explain or compare wrote, or a photo.")],
    model: Annotated[str, typer.Option(help="For a photo; as for explain.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="For a photo; as for explain.")] = "auto",
    classes: Annotated[Path | None, typer.Option(help="For a photo; as for explain.")] = None,
    target: Annotated[str, typer.Option(help="For a photo; as for explain.")] = "predicted",
    against: Annotated[str | None, typer.Option(help="For a photo: why the target, and not this class.")] = None,
    preset: Annotated[str, typer.Option(help="For a photo; as for explain.")] = "relprop",
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="report.html in RUN, IMAGE.html for a photo")
    ] = None,
) -> int:
    """Write a report: one HTML file that opens without a server.

    \b
    relprop report out/chelsea
    relprop report compare/chelsea
    relprop report photo.jpg --target tabby --against "tiger cat"

    It has the heatmap, to be quantised and coloured at will, where the relevance went, and how it was made. A photo is
    explained first; then the map at every block is there as well.
    """
    from relprop.app.answer import Question, answer
    from relprop.app.report import compared, saved
    from relprop.app.report import report as made
    from relprop.images import read

    if source.is_dir():
        page = made(saved(source)) if _explains(source) else compared(source)
        file = out or source / "report.html"
    else:
        picture = read(source)
        net = load_model(model, weights, classes)
        question = Question(None if target == "predicted" else target, against, preset)
        page = made(answer(net, picture, source.name, question))
        file = out or Path(f"{source.stem}.html")
    if file.is_dir():
        raise RelpropError(f"{file} is a folder; --out is the file to write.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    typer.echo(f"The report is {file}.")
    return DONE


def _explains(folder: Path) -> bool:
    """Whether a folder holds an explanation, or should hold a comparison."""
    try:
        return "format" in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
