"""The verb that trains: CUB-200-2011, or a folder of your own photos."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, SOME_FAILED, load_model, stderr

if TYPE_CHECKING:
    from relprop.training import Finding

_EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""


def train(
    dataset: Annotated[Literal["cub", "folder"], typer.Argument(help="CUB-200-2011, or a folder for each class.")],
    data: Annotated[Path, typer.Option(help="The folder of the dataset.")],
    part: Annotated[
        str, typer.Option("--train", help="all, head, or a stage and all behind it, such as layer4.")
    ] = "all",
    model: Annotated[str, typer.Option(help="As for explain.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="What to start from; as for explain.")] = "auto",
    seed: Annotated[int, typer.Option(help="Decides the parts, the head's first weights, orders and crops.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="So many trainings, from --seed on.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="At most so many.")] = 300,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    momentum: Annotated[float, typer.Option(min=0, max=1, help="Of the descent.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of all weights that are trained.")] = 1e-4,
    batch_size: Annotated[int, typer.Option(min=2, help="Images a step, over all devices.")] = 32,
    step: Annotated[int, typer.Option(min=1, help="The rate is divided by ten every so many epochs.")] = 30,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a lower validation loss that end it.")] = 6,
    views: Annotated[int, typer.Option(min=1, help="Kept views of a photo, where a part is frozen.")] = 2,
    features: Annotated[
        Path | None, typer.Option(help="Where those are, for several trainings.", show_default="OUT/features")
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu, gpu, mps: as Lightning Fabric calls them.")] = "auto",
    devices: Annotated[str, typer.Option(help="How many; auto takes all.")] = "1",
    precision: Annotated[Literal["32-true", "bf16-mixed"], typer.Option(help="Of training.")] = "32-true",
    workers: Annotated[int, typer.Option(min=1, help="Threads that decode photos.")] = 2,
    check: Annotated[bool, typer.Option("--check", help="Only say what is missing or damaged, by file.")] = False,
    out: Annotated[Path | None, typer.Option(help="Started again, it continues.", show_default="runs/DATASET")] = None,
) -> int:
    """Train a network, with the recipe of the paper; killed at any moment, it continues.

    \b
    relprop train cub --data CUB_200_2011 --check
    relprop train cub --data CUB_200_2011 --devices auto --precision bf16-mixed
    relprop train cub --data CUB_200_2011 --train head --seeds 5
    relprop train folder --data photos/ --train head --out runs/mine
    relprop explain photo.jpg --weights runs/mine/seed0/weights.safetensors

    OUT/seedN/ gets weights.safetensors, which --weights takes, with its manifest, log.csv and which image was in which
    part. With --train head or layer4 the frozen part's features are computed once and kept in OUT/features; five seeds
    of a head take minutes then.
    """
    from relprop import training
    from relprop.memory import keep_freed

    parts = {"cub": training.open_birds, "folder": training.open_folder}[dataset]
    if not data.is_dir():
        raise RelpropError(f"There is no folder {data}.")
    if dataset == "cub":
        found = list(training.birds(data, deep=check))
    else:
        found = [f for _, part in parts(data).items() for f in training.unreadable(part, deep=check)]
    if check:
        return _report(found, data)
    training.refuse(found)
    recipe = training.Recipe(lr, momentum, weight_decay, batch_size, epochs, step, patience, precision)
    keep_freed()
    fabric = training.devices(accelerator, devices, precision)
    place = out or Path("runs") / dataset
    net = load_model(model, weights)
    watch = _Watch(quiet=not fabric.is_global_zero)
    watch.say(str(parts(data, seed)))
    run = training.Training(
        net, lambda s: parts(data, s), place, fabric, recipe, part, views, workers, features, watch.say, watch.tick
    )
    outcomes = [run(each) for each in range(seed, seed + seeds)]
    if fabric.is_global_zero:
        typer.echo(training.tabulate(outcomes))
    return DONE


def _report(found: list[Finding], data: Path) -> int:
    for finding in found:
        typer.echo(f"{'' if finding.grave else 'note: '}{finding}")
    grave = sum(finding.grave for finding in found)
    typer.echo(f"{data} has {grave} missing or damaged files." if grave else f"{data} can be trained with.")
    return SOME_FAILED if grave else DONE


class _Watch:
    """Says lines on stderr, and in between how far it is: in place on a terminal, now and then in a log."""

    def __init__(self, *, quiet: bool) -> None:
        self._console, self._quiet = stderr(), quiet
        self._said = self._began = time.monotonic()
        self._first: tuple[str, int] | None = None

    def say(self, text: str) -> None:
        if not self._quiet:
            self._clear()
            self._console.print(text)

    def tick(self, done: int, total: int, what: str) -> None:
        """As the trainer and the features tell it."""
        from relprop.study.progress import spoken

        kind = what.partition(", loss")[0]
        now = time.monotonic()
        if self._first is None or self._first[0] != kind:
            self._first, self._began = (kind, done), now
        if self._quiet or now - self._said < (0.5 if self._console.is_terminal else _EVERY):
            return
        fresh, self._said = done - self._first[1], now
        left = f", {spoken((now - self._began) / fresh * (total - done))} left" if fresh > 0 else ""
        text = f"{what}: {done} of {total}{left}"
        if self._console.is_terminal:
            self._clear()
            self._console.print(text, end="\r")
        else:
            self._console.print(text)

    def _clear(self) -> None:
        if self._console.is_terminal:
            self._console.print(" " * (self._console.width - 1), end="\r")
