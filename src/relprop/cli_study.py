"""The verbs of measurement for a shell: evaluate, merge, table, methods, metrics."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, SOME_FAILED, load_model, stderr

if TYPE_CHECKING:
    from relprop.cluster import Cluster

Reference = Annotated[str | None, typer.Option(help="Subtract this method's scores, image by image.")]


def evaluate(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder, a listing (.txt, .csv) or WebDataset shards; or a URL.")
    ],
    model: Annotated[str, typer.Option(help="As for explain.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="As for explain.")] = "auto",
    methods: Annotated[str, typer.Option(help="Names that `relprop methods` lists, with commas between.")] = "relprop",
    metrics: Annotated[
        str, typer.Option(help="Names that `relprop metrics` lists, with commas between.")
    ] = "insertion-deletion",
    protocol: Annotated[
        Literal["tie-safe", "otsuki2024", "both", "together"],
        typer.Option(help="How insertion and deletion are measured; together: both, in the same places, at less cost."),
    ] = "tie-safe",
    points: Annotated[
        int | None, typer.Option(min=2, help="Points of a curve; by default 26, or the 101 that were published.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Random orders in which tied pixels are taken.")] = 3,
    baseline: Annotated[
        Literal["black", "mean", "blur"], typer.Option(help="What stands for missing pixels, tie-safe.")
    ] = "black",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many images, spread over the classes.")] = None,
    seed: Annotated[int, typer.Option(help="Which ones.")] = 0,
    shard: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Every N-th batch, from the K-th on; `relprop merge` joins the parts."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images that are explained at once.")] = 8,
    precision: Annotated[Literal["float32", "bf16"], typer.Option(help="Of scoring.")] = "float32",
    out: Annotated[
        str, typer.Option(help="The folder of the study, or a URL; started again, it continues.")
    ] = "runs/study",
    reference: Reference = None,
    ray: Annotated[
        str | None, typer.Option(metavar="[ADDRESS]", help="Work on a Ray cluster: there, or wherever one runs.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --ray: how many.", show_default="all that fit")
    ] = None,
    cpus_per_worker: Annotated[float, typer.Option(min=0, help="With --ray; may be a fraction.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(min=0, help="With --ray; may be a fraction.")] = 0.0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print the plan: pieces, forward passes, hours at the speed measured."),
    ] = False,
) -> int:
    """Measure methods on images; killed at any moment, it continues.

    \b
    relprop evaluate photos/ --methods paper,grad-cam,random --limit 20
    relprop evaluate imagenet/ --methods released+hq-released,released,random --protocol both --out runs/ties
    relprop evaluate photos/ --methods paper,grad-cam --metrics pointing-game,conservation-error,class-sensitivity
    relprop evaluate imagenet/ --shard 3/16 --out runs/part3
    relprop evaluate s3://mine/val-{000..049}.tar --ray --gpus-per-worker 0.5 --out s3://mine/study

    A method explains the predicted class of every image; relprop metrics tells what can be measured, and its cost.
    """
    from relprop.memory import keep_freed
    from relprop.study import evaluate as run
    from relprop.study.forecast import forecast
    from relprop.study.output import Output
    from relprop.study.request import Request
    from relprop.study.watch import Watch

    part = _shard(shard)
    keep_freed()
    net = load_model(model, weights)
    options: dict[str, Any] = {"points": points, "seeds": seeds, "baseline": baseline}
    engine = _cluster(ray, workers, cpus_per_worker, gpus_per_worker)
    # Ray tells on stdout of workers that died; that is for results.
    aside = contextlib.redirect_stdout(sys.stderr) if engine is not None else contextlib.nullcontext()
    if dry_run:
        asked = (net, data, _names(methods), _names(metrics), protocol, limit, seed, part, batch_size, precision)
        request, place = Request.of(*asked, options), Output.at(out)
        with aside:
            plan = forecast(request, place) if engine is None else engine.forecast(request, place)
        typer.echo(str(plan))
        return DONE
    settings: dict[str, Any] = {**options, "limit": limit, "seed": seed, "shard": part}
    watch = Watch(stderr())
    try:
        with watch, aside:
            study = run(
                net,
                data,
                _names(methods),
                _names(metrics),
                protocol=protocol,
                out=out,
                batch_size=batch_size,
                precision=precision,
                progress=watch,
                engine=engine,
                **settings,
            )
    except KeyboardInterrupt:
        there = f"{watch.last}; what was measured is in {out}" if watch.last else f"Nothing was added to {out}"
        typer.echo(f"\n{there}, and the same command continues.", err=True)
        raise
    if study.rows:
        typer.echo(str(study.table(reference)))
    for name, reason in study.notes.items():
        typer.echo(f"note: {name}: {reason}", err=True)
    for name, reason in study.failures.items():
        typer.echo(f"error: {name}: {reason}", err=True)
    return SOME_FAILED if study.failures else DONE


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of studies.")],
    out: Annotated[Path, typer.Option(help="The folder for all their rows; what it holds already stays.")],
) -> None:
    """Join the rows of several runs, such as the shards of a study, in one folder.

    \b
    relprop merge runs/part1 runs/part2 runs/part3 --out runs/all
    relprop table runs/all

    A row is known by what it was computed from: the same row from two runs is one row. Runs with other weights, or
    other settings of the same metric, are refused, since a table would mix them.
    """
    from relprop.study import merge as join

    merged = join(runs, out)
    for source in merged.sources:
        typer.echo(f"{source.folder}: {source.rows} rows, {source.added} of them new")
    typer.echo(f"{out} holds {merged.rows} rows.")
    if merged.note:
        typer.echo(f"note: rows.parquet: {merged.note}", err=True)


def table(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a study, or its URL.")],
    form: Annotated[
        Literal["markdown", "latex", "csv"], typer.Option("--format", help="How to write it.")
    ] = "markdown",
    reference: Reference = None,
    columns: Annotated[str | None, typer.Option(help="Names of scores, with commas between.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these, in this order, with commas between.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Only these, with commas between.")] = None,
    protocol: Annotated[
        Literal["both", "otsuki2024", "tie-safe"], typer.Option(help="Of insertion and deletion.")
    ] = "both",
) -> None:
    """Print what a study has measured: means, 95 % intervals, paired differences.

    \b
    relprop table runs/study --reference grad-cam
    relprop table runs/study --columns score --format latex
    relprop table runs/study --methods paper,random --metrics insertion-deletion --protocol tie-safe
    """
    from relprop.study import read, tabulate

    chosen = {"columns": columns, "methods": methods, "metrics": metrics}
    asked: dict[str, Any] = {name: _names(text) for name, text in chosen.items() if text}
    typer.echo(tabulate(read(run, curves=False), reference, protocol=protocol, **asked).to(form))


def methods() -> None:
    """List methods, with what they sum to, their cost in forward passes and where they were published."""
    from relprop import methods as there

    for name in there.names():
        method = there.get(name)
        typer.echo(f"{name:<26} {method.cost:>7g}  {method.law}; {method.citation}")
    typer.echo("\nThe number is the cost in forward passes. +hq or +hq-released behind a name quantises its maps.")


def metrics() -> None:
    """List metrics, with what they say, and what an image costs beyond its explanation."""
    from relprop.study.measures import METRICS

    for name, about in METRICS.items():
        typer.echo(f"{name:<22} {about.says}. Costs {about.cost}.")
    typer.echo("\nWhat needs the place of objects is measured where a dataset has boxes or masks.")


ANYWHERE = "auto"
"""What --ray stands for alone."""


def spelled(arguments: Sequence[str]) -> list[str]:
    """The words of a command, with an address behind a --ray that has none."""
    words: list[str] = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        bare = word == "--ray" and not re.fullmatch(r"auto|local|(ray://)?[^/:]+:\d+", following)
        words += [word, ANYWHERE] if bare else [word]
    return words


def _cluster(address: str | None, workers: int | None, cpus: float, gpus: float) -> Cluster | None:
    if address is None:
        if workers is not None or gpus or cpus != 1:
            raise RelpropError("Workers are a cluster's; add --ray.")
        return None
    from relprop.cluster import Cluster

    where = None if address == ANYWHERE else address
    return Cluster(where, workers, cpus, gpus, stderr().print)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if found is None:
        raise RelpropError(f"The shard {text!r} is not understood; write 3/16 for the third of sixteen.")
    return int(found[1]), int(found[2])


VERBS = (evaluate, merge, table, methods, metrics)
