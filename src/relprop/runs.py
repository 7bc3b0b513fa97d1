"""Runs: a walk over images for the command line, with what it says on the way."""

# ruff: noqa: PLC0415 - torch is imported where it computes, so that --help is quick

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from relprop.errors import RelpropError

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console
    from rich.progress import Progress

    from relprop.plans import Plan
    from relprop.result import Explanation
    from relprop.zoo import Model

Row: TypeAlias = dict[str, Any]
"""What there is to say of one explained image, in JSON types."""
Seen: TypeAlias = "tuple[Path, Image, Explanation, Row]"
"""An image file, what the model saw of it, and its explanation."""

DONE, SOME_FAILED = 0, 1


@dataclass
class Run:
    """A walk over images, in batches; what cannot be read or explained is noted, and the rest goes on."""

    paths: Sequence[Path]
    model: str
    weights: str
    classes: Path | None
    target: str
    how: dict[str, Any]
    start: str | None
    batch_size: int
    strict: bool = False
    failures: list[dict[str, str]] = field(default_factory=list)

    @cached_property
    def net(self) -> Model:
        """Loaded when the first image has been read: a wrong path is not worth a download."""
        self.bar.stop()  # for that of the download
        net = load_model(self.model, self.weights, self.classes)
        self.bar.start()
        return net

    @cached_property
    def plan(self) -> Plan:
        import relprop

        return relprop.plan(self.net, self.net.blank, **self.how)

    @cached_property
    def index(self) -> int | None:
        """The target's number; None for the predicted one."""
        return None if self.target == "predicted" else self.net.find_class(self.target)

    @cached_property
    def bar(self) -> Progress:
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal)

    def about(self) -> dict[str, Any]:
        """What was run, in JSON types."""
        weights = asdict(self.net.source) if "net" in self.__dict__ else None
        return {"model": self.model, "weights": weights, **self.how, "start": self.start, "strict": self.strict}

    def __iter__(self) -> Iterator[Seen]:
        """The images that could be explained, one after another."""
        from relprop.images import read

        batch: list[tuple[Path, Image]] = []
        task = self.bar.add_task("explaining", total=len(self.paths))
        for number, path in enumerate(self.paths, 1):
            with self.noting(path):
                batch.append((path, read(path)))
            if batch and (len(batch) == self.batch_size or number == len(self.paths)):
                yield from self._explained(batch)
                batch = []
            self.bar.update(task, completed=number - len(batch))

    def _explained(self, batch: list[tuple[Path, Image]]) -> Iterator[Seen]:
        import torch

        import relprop
        from relprop.figure import sample

        _ = self.plan, self.index  # what no image can mend ends the run
        x = torch.stack([self.net.prepare(picture) for _, picture in batch])
        try:
            e = relprop.explain(self.net, x, self.index, **self.how, start=self.start, strict=self.strict)
        except RelpropError as error:
            if len(batch) > 1:  # one by one, to find whose fault it is
                for each in batch:
                    yield from self._explained([each])
            else:
                self.failures.append({"image": str(batch[0][0]), "error": str(error)})
            return
        for i, (path, picture) in enumerate(batch):
            one = sample(e, i)
            yield path, self.net.crop(picture), one, row_of(path, self.net, one)

    @contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Notes why an image failed."""
        try:
            yield
        except RelpropError as error:
            self.failures.append({"image": str(path), "error": str(error)})
        except OSError as error:
            reason = error.strerror or f"the disk may be full ({error})"
            sentence = f"The results for {path} cannot be written: {reason}."
            self.failures.append({"image": str(path), "error": sentence})

    def say(self, text: str, *, unless: bool) -> None:
        """Prints a result, out of the way of the progress bar."""
        if not unless:
            self.bar.stop()
            typer.echo(text)
            self.bar.start()

    def finish(self) -> int:
        """Lists what failed, and gives the exit code."""
        for failure in self.failures:
            typer.echo(f"error: {failure['error']}", err=True)
        return SOME_FAILED if self.failures else DONE


def named(about: Mapping[str, Any]) -> str:
    """What a class is called."""
    return str(about["name"] or f"class {about['class']}")


def account(e: Explanation) -> Row:
    """How one explanation adds up."""
    leaks = {node: float(e.ledger.entry([i]).leak.max()) for i, node in enumerate(e.ledger.nodes)}
    worst = max(leaks, key=lambda node: leaks[node])
    return {
        "start": float(e.start[0]),
        "conservation_error": float(e.ledger.error.max()),
        "largest_leak": leaks[worst],
        "leaks_most": worst,
    }


def row_of(path: Path, net: Model, e: Explanation) -> Row:
    """What there is to say of one explained image."""
    probability = e.output[0].double().softmax(0)
    best = probability.topk(min(5, len(probability)))

    def about(index: int) -> dict[str, Any]:
        name, synset = (names[index] if names else None for names in (net.classes, net.synsets))
        return {"class": index, "name": name, "synset": synset, "probability": float(probability[index])}

    absorbed = {
        f"{cause} at {e.ledger.nodes[node]}": float((amount / e.ledger.start).abs().max())
        for node, causes in e.ledger.absorbed.items()
        for cause, amount in causes.items()
    }
    return {
        "image": str(path),
        "top": [about(index) for index in best.indices.tolist()],
        "target": about(int(e.target[0])),
        **account(e),
        "absorbed": sum(absorbed.values()),
        "absorbs_most": max(absorbed, key=lambda where: absorbed[where], default=None),
    }


@cache
def stderr() -> Console:
    """Where everything goes that is no result."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)


def load_model(model: str, weights: str, classes: Path | None = None) -> Model:
    """Loads a model, with all that there is to say about it on stderr."""
    from rich.progress import BarColumn, DownloadColumn, Progress

    from relprop.zoo import load

    console = stderr()
    columns = ("fetching", BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        return load(model, weights, classes=classes, report=console.print, progress=progress)
