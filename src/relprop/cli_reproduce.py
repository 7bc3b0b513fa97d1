"""The verb that makes the paper's tables and figures anew."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from relprop.errors import RelpropError
from relprop.runs import DONE, SOME_FAILED, load_model

ALL, PAGE = "all", "page"


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A table or figure of the paper, page, or all.")],
    data: Annotated[Path | None, typer.Option(help="A folder of ImageNet's validation images, or CUB's.")] = None,
    dataset: Annotated[Literal["imagenet", "cub"], typer.Option(help="Which of the paper's two.")] = "imagenet",
    limit: Annotated[int, typer.Option(min=1, help="At most so many images, one a class.")] = 50,
    costly: Annotated[int, typer.Option(min=1, help="And of those so many for Score-CAM.")] = 24,
    model: Annotated[str, typer.Option(help="As for explain.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="As for explain; for cub, a folder that train wrote.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images that are explained at once.")] = 8,
    page: Annotated[Path | None, typer.Option(help="The page whose blocks are written anew; for page.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of results; started again, it continues.")] = Path(
        "runs/reproduction"
    ),
) -> int:
    """Make a table or figure of the paper anew: its figures beside those measured here, under two protocols.

    \b
    table1 table2 table3 rules        the paper's tables
    channels classes pools norms      what they leave open
    conservation errors timing        its analyses
    qualitative splitting quantization ablation   its figures
    page                              a page's tables, from the results in --out
    \b
    relprop reproduce table2 --data imagenet/ --limit 10
    relprop reproduce all --data imagenet/ --limit 50 --out runs/reproduction
    relprop reproduce page --out results/imagenet --page docs/reproduction.md
    relprop reproduce page --out results/preset --page docs/preset.md
    relprop reproduce table1 --dataset cub --data CUB_200_2011 --weights runs/cub --out runs/birds
    """
    from relprop import datasets
    from relprop.memory import keep_freed
    from relprop.reproduction.work import BARE, TASKS, WHERE, Work

    if name == PAGE:
        return _page(page or out / "README.md", out, dataset)
    if dataset == "cub":
        return _birds(name, data, limit, costly, model, weights, batch_size, out)
    if name not in (*TASKS, ALL):
        raise RelpropError(f"There is no {name!r} to reproduce; there are {', '.join(TASKS)}, {PAGE} and {ALL}.")
    keep_freed()
    images = None if data is None else datasets.open(data).first()
    chosen = TASKS if name == ALL else [name]
    if images is None and not set(chosen) <= BARE:
        raise RelpropError(WHERE)
    _make(out)
    work = Work(load_model(model, weights), images, limit, costly, batch_size, out)
    for each in chosen:
        typer.echo(f"{each}\n\n{TASKS[each](work)}\n")
    return _failed(work.failures)


def _page(path: Path, out: Path, dataset: str) -> int:
    from relprop.reproduction import birds, choice, page

    if not path.is_file():
        raise RelpropError(f"There is no page {path}; pass one with blocks such as <!-- table1 --> as --page.")
    ours = (out / choice.SEARCH).is_file()
    refresh = choice.refresh if ours else birds.refresh if dataset == "cub" else page.refresh
    path.write_text(refresh(path.read_text(encoding="utf-8"), out), encoding="utf-8")
    return DONE


def _birds(
    name: str, data: Path | None, limit: int, costly: int, model: str, weights: str, batch_size: int, out: Path
) -> int:
    from relprop import datasets
    from relprop.memory import keep_freed
    from relprop.reproduction.birds import Birds, found
    from relprop.reproduction.work import Work

    if name != "table1":
        raise RelpropError(f"Of CUB-200-2011 there are table1 and page, and no {name!r}.")
    if data is None:
        raise RelpropError("This needs images; pass --data DIR with CUB-200-2011 in its official layout.")
    keep_freed()
    images = datasets.open(data).first()
    if weights == "auto":
        raise RelpropError("No published network knows these classes; pass --weights with what relprop train wrote.")
    files = found(Path(weights))
    _make(out)
    models = {seed: partial(load_model, model, str(path)) for seed, path in files.items()}
    work = Work(None, images, limit, costly, batch_size, out)
    typer.echo(f"{name}\n\n{Birds(models, work)()}\n")
    return _failed(work.failures)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RelpropError(f"The folder {out} cannot be made: {error.strerror}.") from None


def _failed(failures: Mapping[str, str]) -> int:
    for failure, reason in failures.items():
        typer.echo(f"error: {failure}: {reason}", err=True)
    return SOME_FAILED if failures else DONE
