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
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from relprop import (
    __version__,
    cli_compare,
    cli_doctor,
    cli_report,
    cli_reproduce,
    cli_serve,
    cli_study,
    cli_train,
)
from relprop.errors import RelpropError
from relprop.runs import DONE, SOME_FAILED, Row, Run, load_model, named

__all__ = ["app", "main"]

NOTHING_DONE, INTERRUPTED = 2, 130

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)

# The names in presets.PRESETS and merges.NAMES, written out because those import torch; a test compares them.
Preset = Literal[
    "relprop", "paper", "released", "mixture", "released-mixture", "epsilon", "epsilon-plus-flat", "epsilon-gamma-box"
]
Split = Literal["symmetric", "ratio", "signed", "main-only"]

Images = Annotated[
    list[str] | None, typer.Argument(metavar="IMAGE_OR_FOLDER", show_default="the bundled photo of a cat")
]
ModelName = Annotated[str, typer.Option("--model", help="A name that `relprop models` lists, or timm:NAME.")]
Weights = Annotated[str, typer.Option(help="auto, one that `relprop models` lists, random, or a checkpoint file.")]
Classes = Annotated[Path | None, typer.Option(help="A text file with the class names of your checkpoint, one a line.")]
Target = Annotated[str, typer.Option(help="The class to explain: predicted, an index, a synset or a name.")]
PresetName = Annotated[Preset, typer.Option(help="Which rules to use; `relprop plan` shows what that means.")]
SplitName = Annotated[Split | None, typer.Option(help="How sums part relevance.", show_default="the preset's")]
IdentitySkips = Annotated[bool, typer.Option("--identity-skips/--no-identity-skips", help="Let those have a share.")]
Start = Annotated[
    Literal["probability", "contrast", "logit", "one"] | None,
    typer.Option(help="What the target starts with.", show_default="the preset's own"),
]
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
    relprop train folder --data photos/    a network of your own, to be explained
    relprop serve                          the same in a browser
    relprop models                         names, and weights that can be had
    relprop doctor                         is all there? what is missing?

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
    preset: PresetName = "relprop",
    split: SplitName = None,
    identity_skips: IdentitySkips = True,
    start: Start = None,
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
    run = Run(paths, model, weights, classes, target, how, start, batch_size, strict)
    rows: list[Row] = []
    with figure.workplace(out) as work, run.bar:
        for path, photo, explanation, row in run:
            files: list[Path] = []
            with run.noting(path):
                label = f"{named(row['target'])}, {100 * row['target']['probability']:.0f} %"
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
    preset: PresetName = "relprop",
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
    import relprop

    net = load_model(model, weights)
    made = relprop.plan(net, net.blank, preset=preset, split=split, identity_skips=identity_skips)
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
    preset: PresetName = "relprop",
    split: SplitName = None,
    identity_skips: IdentitySkips = True,
    start: Start = None,
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
    relprop check --model resnet18 --weights random --preset paper --tolerance 1e-6
    relprop check photo.jpg --preset epsilon --max-absorbed 0.05

    An image passes if no node, nor the whole, leaks more than the tolerance, and if what is absorbed by design (the
    sum of absolute values over nodes and causes, relative to the start) is at most --max-absorbed. Exit code 1 says
    that one does not pass.
    """
    from relprop.images import PHOTO, find

    how = {"preset": preset, "split": split, "identity_skips": identity_skips}
    run = Run(find(images or [PHOTO]), model, weights, classes, target, how, start, batch_size)
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
    from relprop import catalogue, zoo
    from relprop.cache import folder

    rows = [{"model": n, "weights": catalogue.labels(n), "cached": catalogue.cached(n)} for n in zoo.names()]
    if as_json:
        _print_json({"cache": str(folder()), "models": rows})
        return
    for row in rows:
        labels = [f"{label} (cached)" if label in row["cached"] else label for label in row["weights"]]
        typer.echo(f"{row['model']:<18} {', '.join(labels)}")
    typer.echo(f"\nThe cache is {folder()}; torchvision:NAME and timm:NAME take any model of theirs.")


for _verb in (
    *(cli_compare.compare, cli_report.report, cli_serve.serve, *cli_study.VERBS),
    *(cli_reproduce.reproduce, cli_train.train, cli_doctor.doctor),
):
    app.command()(_verb)


def _count(rows: Sequence[Any]) -> str:
    return "1 image" if len(rows) == 1 else f"{len(rows)} images"


def _explanation_text(row: Row, predicted: bool) -> str:
    lines = [row["image"]]
    lines += [f"  {100 * top['probability']:6.2f} %  {top['class']:4d}  {named(top)}" for top in row["top"]]
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
        code = app(
            cli_study.spelled([a for a in arguments if a != "--debug"]), prog_name="relprop", standalone_mode=False
        )
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
