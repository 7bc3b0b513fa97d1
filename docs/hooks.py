"""For mkdocs: pages that are kept elsewhere in the repository, and parts of pages that are written from the code.

A comment such as ``<!-- methods -->`` on a line of its own is replaced by what the function of that name below returns,
so that no table of what there is can go stale.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent

ELSEWHERE = {
    "benchmarks.md": "benchmarks/README.md",
    "points.md": "results/points/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
"""From a page's place in the documentation to its place in the repository."""

_PAGES = {source: page for page, source in ELSEWHERE.items()}


# -- mkdocs calls these --


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are kept elsewhere, their pictures, and the notebooks."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
        for picture in (ROOT / source).parent.glob("*.png"):
            files.append(File.generated(config, picture.name, content=picture.read_bytes()))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebook-{path.stem}.md", content=notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in what is written from the code, and mends links that lead out of the documentation."""
    written = re.sub(r"^<!-- (\w+) -->$", _written, markdown, flags=re.MULTILINE)
    source = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return re.sub(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))", lambda link: relink(link[1], source), written)


def relink(link: str, source: str) -> str:
    """A link from a page of the repository, as one within the documentation; what is not there stays as it is."""
    path, hash_, anchor = link.partition("#")
    there = os.path.normpath(os.path.join(os.path.dirname(source), path)).replace(os.sep, "/")  # noqa: PTH118, PTH120
    page = _PAGES.get(there) or _PAGES.get(f"{there}/README.md")
    if page is not None:
        return f"{page}{hash_}{anchor}"
    return f"{there.removeprefix('docs/')}{hash_}{anchor}" if there.startswith("docs/") else link


def _written(mark: re.Match[str]) -> str:
    return PARTS[mark[1]]() if mark[1] in PARTS else mark[0]


# -- what is written from the code --


def notebook(path: Path) -> str:
    """A notebook as a page: its text and its code; run it to see what comes out."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"*This page is `notebooks/{path.name}` of the repository, without its outputs.*", ""])


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cli() -> str:
    """What ``--help`` says, for the command and every verb of it."""
    import typer

    from relprop.cli import app

    command: Any = typer.main.get_command(app)
    context = type(command).context_class(command, info_name="relprop", terminal_width=100, max_content_width=100)
    parts = [f"## relprop\n\n```text\n{command.get_help(context)}\n```"]
    for name in command.list_commands(context):
        verb = command.get_command(context, name)
        inner = type(command).context_class(
            verb, info_name=name, parent=context, terminal_width=100, max_content_width=100
        )
        parts.append(f"## relprop {name}\n\n```text\n{verb.get_help(inner)}\n```")
    return "\n\n".join(parts)


def presets() -> str:
    """Every preset, with all that it decides."""
    from relprop.presets import PRESETS

    head = ["preset", "convolutions", "matrices", "averages", "first layer", "max pool", "norms", "upper half", "sums"]
    head += ["sums of the lower half", "head", "strides", "start"]
    rows = []
    for name, p in PRESETS.items():
        upper = f"{p.upper}; norms {p.upper_norm}" if p.upper else "the same"
        row = [f"`{name}`", p.conv, p.dense, p.average, p.first, p.pool, p.norm, upper, p.split]
        row += [p.lower_split or "the same", p.head or "the same", "evened" if p.even else "as they are"]
        rows.append([*row, p.start or "probability"])
    return table(head, rows)


def methods() -> str:
    """Every method: its cost, its law, its source."""
    from relprop import methods as there

    found = (there.get(name) for name in there.names())
    rows = ([f"`{m.name}`", m.family, f"{m.cost:g}", m.law, m.citation] for m in found)
    return table(["method", "family", "cost", "what it sums to", "published in"], rows)


def metrics() -> str:
    """Every metric of a study: what it says and costs."""
    from relprop.study.measures import METRICS

    return table(["metric", "what it says", "cost"], ([f"`{n}`", m.says, m.cost] for n, m in METRICS.items()))


def overrides() -> str:
    """Every word that an override may be."""
    from relprop import merges, rules
    from relprop import presets as words

    rows = [
        ("convolutions, matrices, averages", rules.NAMES),
        ("sums", merges.NAMES),
        ("max pools", words.POOLINGS),
        ("batch, layer, group and instance norms", (words.PASS, words.FOLD)),
        ("products", (words.HALVES,)),
        ("operators that have no rule", (words.PASS,)),
    ]
    return table(["what stands there", "what may be said"], ([a, ", ".join(f"`{w}`" for w in b)] for a, b in rows))


def costs() -> str:
    """What the libraries cost, as `make bench` measured it."""
    measured = json.loads((ROOT / "benchmarks/results.json").read_text(encoding="utf-8"))["cost"]
    wanted = ("**relprop** `paper`", "**relprop** `epsilon`", "captum", "zennit", "pytorch-grad-cam", "forward +")
    rows: dict[str, dict[int, str]] = {}
    for row in measured["devices"]["cpu"]:
        if row["name"].startswith(wanted) and "recompute" not in row["name"] and row["batch"] in (1, 8):
            rows.setdefault(row["name"], {})[row["batch"]] = f"{row['ratio']:.1f}"
    about = measured["about"]
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in ("torch", "captum", "zennit"))
    return (
        table(
            ["an explanation costs, in forward passes", "batch 1", "batch 8"],
            ([n, r.get(1, ""), r.get(8, "")] for n, r in rows.items()),
        )
        + f"\n\nResNet-50, 224x224, {about['threads']} CPU threads, {versions}, measured on {about['date']}; "
        + "[the page of benchmarks](benchmarks.md) says how, and how far to trust it."
    )


def misses() -> str:
    """The bars that were not reached when cost was last measured."""
    lines = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("- ") and "**miss**" in line)


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part for part in (cli, presets, methods, metrics, overrides, costs, misses)
}
"""By the name in the comment."""
