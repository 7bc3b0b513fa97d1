"""The documentation: its code runs and paints its pictures, it builds strictly and asks nobody else for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pages
import pytest
import real
import typer
from nbclient import NotebookClient

import relprop
from relprop import cli_study, methods, presets
from relprop.cli import app
from relprop.study.measures import METRICS

ROOT = pages.ROOT
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMMAND: Any = typer.main.get_command(app)


def codes() -> list[Path]:
    return [page for page in pages.PAGES if pages.blocks(page)]


# -- code --


@pytest.mark.filterwarnings("ignore")  # of the libraries that pages compare with
@pytest.mark.parametrize("page", codes(), ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_paints_its_pictures(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    left_out = [block for block in pages.blocks(page) if block.reason]
    small = page.name != "index.md"  # one page with real weights; on the others a small network stands for them
    if not small:
        real.load("resnet50", "keras")
    pages.run(page, tmp_path, small=small)
    assert pages.figures(page) - pages.ELSEWHERE <= pages.painted(tmp_path).keys()
    if not small:
        assert "Egyptian cat" in capsys.readouterr().out
    for block in left_out:
        with capsys.disabled():
            print(f"\n{block} is not run: {block.reason}")


def test_a_block_that_is_not_run_says_why(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("*Not run by the tests: it needs\na GPU.*\n\n```python\n1 / 0\n```\n\n```python\n1\n```\n")
    assert [(b.reason, b.text) for b in pages.blocks(page)] == [("it needs a GPU.", "1 / 0\n"), (None, "1\n")]


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_there(page: Path) -> None:
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE))
    for program, *arguments in pages.commands(page):
        if program == "relprop":
            if arguments[0].startswith("-"):
                assert arguments[0] in {"--help", *(word for option in COMMAND.params for word in option.opts)}
            else:  # raises if an option or a value is not there
                COMMAND.commands[arguments[0]].make_context(arguments[0], cli_study.spelled(arguments[1:]))
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), arguments
        else:
            for asked in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
                assert set(asked.split(",")) <= extras


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of the machinery that runs notebooks
def test_a_notebook_runs_and_is_kept_without_outputs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELPROP_SMALL", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert any(output.output_type == "display_data" for cell in cells for output in cell.outputs)


# -- the site --


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # A fresh interpreter: what plugins import and warn of is theirs.
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


class Asks(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.urls.append(given.get("src") or "")
        if tag == "link":
            self.urls.append(given.get("href") or "")


def test_the_site_asks_nobody_else_for_anything(site: Path) -> None:
    asked = Asks()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        asked.feed(text)
        assert not re.search(r"@import|fonts\.g|class=\"mermaid", text), page  # the theme fetches what draws the last
    assert len(asked.urls) > 100
    assert not [url for url in asked.urls if re.match(r"(https?:)?//", url)]
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_what_is_written_from_the_code_is_all_there(site: Path) -> None:
    def page(name: str) -> str:
        return (site / f"{name}.html").read_text(encoding="utf-8")

    assert not [p for p in site.glob("*.html") if re.search(r"&lt;!-- \w+ --&gt;|:func:|:class:", p.read_text("utf-8"))]
    assert all(f'id="relprop-{verb}"' in page("reference-cli") for verb in COMMAND.commands)
    assert all(f"<code>{name}</code>" in page("reference-presets") for name in presets.PRESETS)
    assert all(f"<code>{name}</code>" in page("reference-methods") for name in methods.names())
    assert all(f"<code>{name}</code>" in page("reference-metrics") for name in METRICS)
    assert all(f'id="relprop.{name}"' in page("reference-api") for name in relprop.__all__)
    assert "captum LRP" in page("migrate-captum")
    assert all((site / f"notebook-{path.stem}.html").exists() for path in NOTEBOOKS)
