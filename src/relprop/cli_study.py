"""The verbs of measurement for a shell: evaluate, table, methods."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, SOME_FAILED, load_model, stderr

Reference = Annotated[str | None, typer.Option(help="Subtract this method's scores, image by image.")]


def evaluate(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder: ImageNet's, CUB-200-2011's, or any images.")],
    model: Annotated[str, typer.Option(help="As for explain.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="As for explain.")] = "auto",
    methods: Annotated[str, typer.Option(help="Names that `relprop methods` lists, with commas between.")] = "paper",
    metrics: Annotated[str, typer.Option(help="Names of metrics, with commas between.")] = "insertion-deletion",
    protocol: Annotated[
        Literal["tie-safe", "otsuki2024", "both"], typer.Option(help="How insertion and deletion are measured.")
    ] = "tie-safe",
    points: Annotated[
        int | None, typer.Option(min=2, help="Points of a curve; by default 26, or the 101 that were published.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Random orders in which tied pixels are taken.")] = 3,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many images, spread over the classes.")] = None,
    seed: Annotated[int, typer.Option(help="Which ones.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Images that are explained at once.")] = 8,
    precision: Annotated[Literal["float32", "bf16"], typer.Option(help="Of scoring.")] = "float32",
    out: Annotated[Path, typer.Option(help="The folder of the study; started again, it continues.")] = Path(
        "runs/study"
    ),
    reference: Reference = None,
) -> int:
    """Measure methods on images; killed at any moment, it continues.

    \b
    relprop evaluate photos/ --methods paper,grad-cam,random --limit 20
    relprop evaluate imagenet/ --methods released+hq-released,released,random --protocol both --out runs/ties
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from relprop.memory import keep_freed
    from relprop.study import evaluate as run

    keep_freed()
    net = load_model(model, weights)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal) as bar:
        task = bar.add_task("images", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        settings: dict[str, Any] = {"points": points, "seeds": seeds, "limit": limit, "seed": seed}
        study = run(
            net,
            data,
            methods.split(","),
            metrics.split(","),
            protocol=protocol,
            out=out,
            batch_size=batch_size,
            precision=precision,
            progress=progress,
            **settings,
        )
    if study.rows:
        typer.echo(str(study.table(reference)))
    for name, reason in study.failures.items():
        typer.echo(f"error: {name}: {reason}", err=True)
    return SOME_FAILED if study.failures else DONE


def table(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a study.")],
    form: Annotated[
        Literal["markdown", "latex", "csv"], typer.Option("--format", help="How to write it.")
    ] = "markdown",
    reference: Reference = None,
    columns: Annotated[str | None, typer.Option(help="Names of scores, with commas between.")] = None,
) -> None:
    """Print what a study has measured: means, 95 % intervals, paired differences.

    \b
    relprop table runs/study --reference grad-cam
    relprop table runs/study --columns score --format latex
    """
    from relprop.study import Journal, tabulate

    path = run / "journal.sqlite"
    if not path.exists():
        raise RelpropError(f"{run} holds no study; relprop evaluate ... --out {run} makes one.")
    with Journal(path) as journal:
        typer.echo(tabulate(journal, reference, columns.split(",") if columns else None).to(form))


def methods() -> None:
    """List methods, with what they sum to, their cost in forward passes and where they were published."""
    from relprop import methods as there

    for name in there.names():
        method = there.get(name)
        typer.echo(f"{name:<26} {method.cost:>7g}  {method.law}; {method.citation}")
    typer.echo("\nThe number is the cost in forward passes. +hq or +hq-released behind a name quantises its maps.")
