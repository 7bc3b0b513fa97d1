"""The command line: the verbs of the package for a shell.

Results go to stdout and all else to stderr. Exit codes: 0, all is done; 1, an image failed or does not add up, and the
others are done; 2, the request cannot be met and nothing was done; 130, interrupted, and what was done stays.
"""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from relprop import __version__
from relprop.errors import RelpropError

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console
    from rich.progress import Progress

    from relprop.plans import Plan
    from relprop.result import Explanation
    from relprop.zoo import Model

__all__ = ["app", "main"]

Row: TypeAlias = dict[str, Any]
"""What there is to say of one explained image, in JSON types."""
Seen: TypeAlias = "tuple[Path, Image, Explanation, Row]"
"""An image file, what the model saw of it, and its explanation."""

DONE, SOME_FAILED, NOTHING_DONE, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

# The names in plans.PRESETS and merges.NAMES, written out because those import torch; a test compares them.
Preset = Literal[
    "paper", "released", "mixture", "released-mixture", "epsilon", "epsilon-plus-flat", "epsilon-gamma-box"
]
Split = Literal["symmetric", "ratio", "signed", "main-only"]

Images = Annotated[
    list[str] | None, typer.Argument(metavar="IMAGE_OR_FOLDER", show_default="the bundled photo of a cat")
]
ModelName = Annotated[str, typer.Option("--model", help="A name that `relprop models` lists, or timm:NAME.")]
Weights = Annotated[str, typer.Option(help="auto, imagenet1k_v1, imagenet1k_v2, keras, random, or a checkpoint file.")]
Classes = Annotated[Path | None, typer.Option(help="A text file with the class names of your checkpoint, one a line.")]
Target = Annotated[str, typer.Option(help="The class to explain: predicted, an index, a synset or a name.")]
PresetName = Annotated[Preset, typer.Option(help="Which rules to use; `relprop plan` shows what that means.")]
SplitName = Annotated[Split | None, typer.Option(help="How sums part relevance.", show_default="the preset's")]
IdentitySkips = Annotated[bool, typer.Option("--identity-skips/--no-identity-skips", help="Let those have a share.")]
Start = Annotated[Literal["probability", "logit", "one"], typer.Option(help="What the target starts with.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images that are explained at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and everything else to stderr.")]


@app.callback(invoke_without_command=True)
def _relprop(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Layer-wise Relevance Propagation for residual networks that always adds up.

    \b
    relprop explain                        explain the bundled photo of a cat
    relprop explain photo.jpg photos/      your own, into out/
    relprop plan --preset mixture          what would be done, node by node
    relprop check photos/                  does it add up? for CI
    relprop models                         names, and weights that can be had

    Exit codes: 0, all done; 1, an image failed or does not add up; 2, nothing could be done; 130, interrupted. An error
    is one sentence; with --debug, anywhere, its traceback comes along.
    """
    if version or context.invoked_subcommand is None:
        typer.echo(f"relprop {__version__}" if version else context.get_help())
        raise typer.Exit(DONE)


@app.command()
def explain(
    images: Images = None,
    model: ModelName = "resnet50",
    weights: Weights = "auto",
    classes: Classes = None,
    target: Target = "predicted",
    preset: PresetName = "paper",
    split: SplitName = None,
    identity_skips: IdentitySkips = True,
    start: Start = "probability",
    quantize: Annotated[bool, typer.Option(help="Show the quantised heatmap beside the raw one.")] = True,
    edges: Annotated[
        Literal["paper", "released"], typer.Option(help="Where Heat Quantization has its edges.")
    ] = "paper",
    levels: Annotated[int, typer.Option(min=2, max=256, help="How many levels Heat Quantization has.")] = 8,
    batch_size: BatchSize = 8,
    out: Annotated[Path, typer.Option(help="The folder for the results, one in it for each image.")] = Path("out"),
    strict: Annotated[bool, typer.Option("--strict", help="Fail on a leak that no cause explains.")] = False,
    as_json: AsJson = False,
) -> int:
    """Explain what a model sees in images.

    \b
    relprop explain photo.jpg
    relprop explain photos/ more/cat.png --out results
    relprop explain photo.jpg --target tabby --preset mixture
    relprop explain photo.jpg --weights mine.safetensors --classes mine.txt
    relprop explain photos/ --json > results.json

    For each image, OUT/NAME/ gets figure.png (photo, heatmap, flow through the residual blocks), panel.png (photo, raw
    and quantised heatmap), each picture on its own, relevance.npy and a manifest; relprop.Explanation.load reads it.
    """
    from relprop import figure
    from relprop.images import PHOTO, find, names

    paths = find(images or [PHOTO])
    folders = {path: out / name for path, name in zip(paths, names(paths), strict=True)}
    quantization = {"edges": edges, "levels": levels} if quantize else None
    how = {"preset": preset, "split": split, "identity_skips": identity_skips}
    run = _Run(paths, model, weights, classes, target, how, start, batch_size, strict)
    rows: list[Row] = []
    with figure.workplace(out) as work, run.bar:
        for path, photo, explanation, row in run:
            files: list[Path] = []
            with run.noting(path):
                label = f"{_name(row['target'])}, {100 * row['target']['probability']:.0f} %"
                quantized = explanation.quantized(levels, edges)[0] if quantize else None
                pictures = figure.pictures(explanation, run.plan, photo, quantized, label)
                about = {**run.about(), "image": str(path), "class": row["target"], "quantization": quantization}
                signed = replace(explanation, settings={**about, **explanation.settings})
                files = figure.save(signed, pictures, work, folders[path])
            if files:
                rows.append({**row, "label": label, "files": [str(file) for file in files]})
                run.say(_explanation_text(rows[-1], run.index is None), unless=as_json)
    if as_json:
        _print_json({**run.about(), "quantization": quantization, "images": rows, "failures": run.failures})
    elif rows:
        what = f"{rows[0]['label']}; the picture is {rows[0]['files'][0]}" if len(rows) == 1 else f"all is in {out}"
        worst = max(row["conservation_error"] for row in rows)
        typer.echo(f"{_count(rows)} explained, conservation error at most {worst:.1e}: {what}.")
    return run.finish()


@app.command()
def plan(
    model: ModelName = "resnet50",
    weights: Annotated[str, typer.Option(help="As for explain; a plan depends on the architecture alone.")] = "random",
    preset: PresetName = "paper",
    split: SplitName = None,
    identity_skips: IdentitySkips = True,
    as_json: AsJson = False,
) -> None:
    """Show which rule or split every node gets.

    \b
    relprop plan
    relprop plan --model resnet18 --preset mixture --split symmetric
    relprop plan --model vgg16 --json

    Nothing is computed. No image is needed, nor trained weights: the plan depends on the architecture alone.
    """
    import torch

    import relprop

    net = _load(model, weights)
    x = torch.zeros(1, 3, net.preparation.crop, net.preparation.crop)
    made = relprop.plan(net, x, preset=preset, split=split, identity_skips=identity_skips)
    if as_json:
        _print_json({"model": model, "weights": asdict(net.source), **made.settings, "nodes": made.rows()})
    else:
        typer.echo(str(made))


@app.command()
def check(
    images: Images = None,
    model: ModelName = "resnet50",
    weights: Weights = "auto",
    classes: Classes = None,
    target: Target = "predicted",
    preset: PresetName = "paper",
    split: SplitName = None,
    identity_skips: IdentitySkips = True,
    start: Start = "probability",
    tolerance: Annotated[float, typer.Option(min=0, help="The largest leak, relative, that is rounding.")] = 1e-5,
    max_absorbed: Annotated[
        float | None, typer.Option(min=0, help="The largest part of the start that biases, epsilons ... may keep.")
    ] = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
) -> int:
    """Audit whether relevance adds up, for CI.

    \b
    relprop check photos/ --weights mine.safetensors
    relprop check --model resnet18 --weights random --tolerance 1e-6
    relprop check photo.jpg --preset epsilon --max-absorbed 0.05

    An image passes if no node, nor the whole, leaks more than the tolerance, and if what is absorbed by design (the
    sum of absolute values over nodes and causes, relative to the start) is at most --max-absorbed. Exit code 1 says
    that one does not pass.
    """
    from relprop.images import PHOTO, find

    how = {"preset": preset, "split": split, "identity_skips": identity_skips}
    run = _Run(find(images or [PHOTO]), model, weights, classes, target, how, start, batch_size)
    rows: list[Row] = []
    with run.bar:
        for *_, row in run:
            row["adds_up"] = row["conservation_error"] <= tolerance and row["largest_leak"] <= tolerance
            row["passed"] = row["adds_up"] and (max_absorbed is None or row["absorbed"] <= max_absorbed)
            rows.append(row)
            run.say(_audit_text(row), unless=as_json)
    passed = sum(row["passed"] for row in rows)
    if as_json:
        limits = {"tolerance": tolerance, "max_absorbed": max_absorbed}
        _print_json({**run.about(), **limits, "images": rows, "failures": run.failures})
    elif rows:
        typer.echo(f"{passed} of {_count(rows)} pass, at a tolerance of {tolerance:g}.")
    return max(run.finish(), DONE if passed == len(rows) else SOME_FAILED)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List models, and weights that can be had.

    \b
    relprop models
    relprop models --json

    Any torchvision:NAME and timm:NAME can be used as well, and a checkpoint file instead of a name of weights.
    """
    from relprop import zoo
    from relprop.compat import import_torchvision
    from relprop.weights import folder

    weights_of = import_torchvision().models.get_model_weights
    rows = []
    for name in zoo.names():
        labels = [entry.name.lower() for entry in weights_of(name) if entry.meta.get("categories")]
        labels += ["keras"] if name == "resnet50" else []
        there = [label for label in labels if any(folder().glob(f"{name}-{label}-????????????????.safetensors"))]
        rows.append({"model": name, "weights": labels, "cached": there})
    if as_json:
        _print_json({"cache": str(folder()), "models": rows})
        return
    for row in rows:
        labels = [f"{label} (cached)" if label in row["cached"] else label for label in row["weights"]]
        typer.echo(f"{row['model']:<18} {', '.join(labels)}")
    typer.echo(f"\nThe cache is {folder()}; torchvision:NAME and timm:NAME take any model of theirs.")


@dataclass
class _Run:
    """A walk over images, in batches; what cannot be read or explained is noted, and the rest goes on."""

    paths: Sequence[Path]
    model: str
    weights: str
    classes: Path | None
    target: str
    how: dict[str, Any]
    start: str
    batch_size: int
    strict: bool = False
    failures: list[dict[str, str]] = field(default_factory=list)

    @cached_property
    def net(self) -> Model:
        """Loaded when the first image has been read: a wrong path is not worth a download."""
        self.bar.stop()  # for that of the download
        net = _load(self.model, self.weights, self.classes)
        self.bar.start()
        return net

    @cached_property
    def plan(self) -> Plan:
        import relprop

        return relprop.plan(self.net, **self.how)

    @cached_property
    def index(self) -> int | None:
        """The target's number; None for the predicted one."""
        return None if self.target == "predicted" else self.net.find_class(self.target)

    @cached_property
    def bar(self) -> Progress:
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, console=_stderr(), transient=True, disable=not _stderr().is_terminal)

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
            yield path, self.net.crop(picture), one, _row(path, self.net, one)

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


def _row(path: Path, net: Model, e: Explanation) -> Row:
    probability = e.output[0].double().softmax(0)
    best = probability.topk(min(5, len(probability)))

    def about(index: int) -> dict[str, Any]:
        name, synset = (names[index] if names else None for names in (net.classes, net.synsets))
        return {"class": index, "name": name, "synset": synset, "probability": float(probability[index])}

    leaks = {node: float(e.ledger.entry([i]).leak.max()) for i, node in enumerate(e.ledger.nodes)}
    worst = max(leaks, key=lambda node: leaks[node])
    absorbed = {
        f"{cause} at {e.ledger.nodes[node]}": float((amount / e.ledger.start).abs().max())
        for node, causes in e.ledger.absorbed.items()
        for cause, amount in causes.items()
    }
    return {
        "image": str(path),
        "top": [about(index) for index in best.indices.tolist()],
        "target": about(int(e.target[0])),
        "start": float(e.start[0]),
        "conservation_error": float(e.ledger.error.max()),
        "largest_leak": leaks[worst],
        "leaks_most": worst,
        "absorbed": sum(absorbed.values()),
        "absorbs_most": max(absorbed, key=lambda where: absorbed[where], default=None),
    }


def _name(about: dict[str, Any]) -> str:
    return about["name"] or f"class {about['class']}"


def _count(rows: Sequence[Any]) -> str:
    return "1 image" if len(rows) == 1 else f"{len(rows)} images"


def _explanation_text(row: Row, predicted: bool) -> str:
    lines = [row["image"]]
    lines += [f"  {100 * top['probability']:6.2f} %  {top['class']:4d}  {_name(top)}" for top in row["top"]]
    lines.append(f"  target              {row['label']}{' (predicted)' if predicted else ''}")
    lines.append(
        f"  conservation error  {row['conservation_error']:.1e}, at one node {row['largest_leak']:.1e} at most"
    )
    folder, names = Path(row["files"][0]).parent, [Path(file).name for file in row["files"]]
    return "\n".join([*lines, f"  written to          {folder}: {' '.join(names)}", ""])


def _audit_text(row: Row) -> str:
    verdict = "ok" if row["passed"] else "ABSORBS" if row["adds_up"] else "LEAKS"
    kept = f"{row['absorbed']:.1e}" + (f" (most as {row['absorbs_most']})" if row["absorbs_most"] else "")
    leak = f"{row['largest_leak']:.1e} (at {row['leaks_most']})"
    return f"{verdict:<7}  error {row['conservation_error']:.1e}  largest leak {leak}  absorbed {kept}  {row['image']}"


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps({"relprop": __version__, **content}, indent=2))


@cache
def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _load(model: str, weights: str, classes: Path | None = None) -> Model:
    """Loads a model, with all that there is to say about it on stderr."""
    from rich.progress import BarColumn, DownloadColumn, Progress

    from relprop.zoo import load

    console = _stderr()
    columns = ("fetching", BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        return load(model, weights, classes=classes, report=console.print, progress=progress)


def _sentence(error: Exception) -> str:
    """What an error that ended the command has to say."""
    usage = getattr(error, "format_message", None)
    if usage is not None:
        context, text = getattr(error, "ctx", None), usage().rstrip(".")
        see = " See" if text.endswith("?") else "; see"
        return f"{text}{see} {context.command_path if context else 'relprop'} --help."
    if isinstance(error, RelpropError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'The output'} cannot be used: {error.strerror}."
    first = next(iter(str(error).splitlines()), "no reason given").rstrip(".")
    return f"Something unexpected, {type(error).__name__}: {first}; --debug shows where."


def _terminated(*_: Any) -> None:
    raise SystemExit(128 + signal.SIGTERM)  # on the way out, what is half done is cleared away


def main(arguments: Sequence[str] | None = None) -> None:
    """The command ``relprop``: whatever happens, the user gets a sentence and the shell an exit code.

    Args:
        arguments: Instead of the shell's.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    debug = "--debug" in arguments
    try:
        code = app([a for a in arguments if a != "--debug"], prog_name="relprop", standalone_mode=False)
        sys.stdout and sys.stdout.flush()  # here, where a full disk still gets its sentence
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:  # the one place where nothing may get through
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {_sentence(error)}", err=True)
        code = NOTHING_DONE
    if code == INTERRUPTED:
        typer.echo("error: Interrupted; what was done before stays.", err=True)
    sys.exit(code)
