"""The code in README.md and docs/*.md: found, and run as a reader would who copies it, a page in one folder.

`test_docs.py` runs all of it on small settings. `make figures` runs it as it stands and keeps what it paints: a page
shows `images/A-B.png` where its own code writes `A/B.png`.

- Blocks of Python share one namespace, from the top of the page down.
- `<!-- first`, Python, `-->` is run where it stands and not shown: what a reader has already.
- `*Not run by the tests: WHY.*` right above a block leaves it out, in front of everybody.
- In a block of `sh`, `relprop` runs in this process, `pip` and `make` are looked at, all else is the shell's.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from PIL import Image

ROOT = Path(__file__).parent.parent
PHOTO = ROOT / "src/relprop/data/chelsea.jpg"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

ELSEWHERE = {"cat.png", "page-explain.jpg", "page-flow.jpg", "extremes.png"} | {
    f"{name}.png" for name in ("ablation", "conservation", "qualitative", "quantization", "splitting")
}
"""Pictures that commands make: `make demo`, `relprop serve` (its screenshots), `relprop reproduce`, and a benchmark."""

WRITTEN = {"reproduction.md": "it needs ImageNet, and hours; test_reproduction.py runs its commands on less"}
"""Pages that are written by a command, whose code is not run, and why."""

_BLOCK = re.compile(
    r"(?:^\*Not run by the tests: (?P<reason>.+?)\*\n+)?"
    r"^(?:```(?P<language>\w+)\n(?P<text>.*?)^```$|<!-- first\n(?P<first>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A piece of code: where it stands, in what language it is, and why it is not run, if it is not."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of Python and shell of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        language, code, group = match["language"], match["text"], "text"
        if match["first"] is not None:
            language, code, group = "python", match["first"], "first"
        line = text.count("\n", 0, match.start(group)) + 1
        if language in ("python", "sh"):
            reason = " ".join(match["reason"].split()) if match["reason"] else WRITTEN.get(page.name)
            found.append(Block(page.name, line, language, code, reason))
    return found


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line of a page, in a block or indented; without its comment."""
    fenced = "".join(block.text for block in blocks(page) if block.language == "sh")
    indented = re.findall(r"^    ((?:relprop|make|pip) .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for line in [*fenced.replace("\\\n", " ").splitlines(), *indented]:
        if re.match(r"(relprop|make|pip) ", line):
            yield shlex.split(line, comments=True)


# -- running --


def furnish(folder: Path) -> None:
    """What a reader is taken to have: the repository's photo, one of their own, and some in a folder for each class."""
    (folder / "src/relprop/data").mkdir(parents=True)
    shutil.copy(PHOTO, folder / "src/relprop/data")
    shutil.copy(PHOTO, folder / "photo.jpg")
    photo = Image.open(PHOTO)
    draw = np.random.default_rng(0)
    for kind in ("heron", "stork"):
        (folder / "photos" / kind).mkdir(parents=True)
        for i in range(1, 6):
            noise = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((256, 256))
            image = photo.crop((10 * i, 5 * i, 250 + 10 * i, 240 + 5 * i)) if kind == "heron" else noise
            image.save(folder / "photos" / kind / f"{i}.jpg")


def run(page: Path, folder: Path, *, small: bool, until: Collection[str] = ()) -> None:
    """Runs a page's code, from the top down, in a folder; to its end, or until there are some pictures.

    Raises:
        AssertionError: If a command ends otherwise than it should.
    """
    from relprop.compat import import_torchvision

    import_torchvision()
    furnish(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with _inside(folder):
        for block in blocks(page):
            if block.reason:
                continue
            if until and painted(folder).keys() >= set(until):
                return
            if block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    _shell(line, small, str(block))
            else:
                text = _smaller(block.text) if small else block.text
                # As many empty lines before it as on the page: a traceback names the page's line.
                exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), names)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        pyplot.close("all")  # pages leave their figures open, as people do


def _smaller(text: str) -> str:
    """A small network instead of the page's, a tiny one for studies; and few points."""
    small = "timm:test_resnet" if "relprop.evaluate" in text else "resnet18"
    load = f'relprop.load("{small}", weights="random")'
    text = re.sub(r'relprop\.load\("(resnet50|efficientnet_lite0)"(, weights="\w+")?\)', load, text)
    text = re.sub(r"\bpoints=\d+", "points=3", text)
    return re.sub(r"\bresnet50\b", "resnet18", text)


_SMALL = {
    "compare": {"--model": "timm:test_resnet", "--points": "2", "--seeds": "1"},
    "evaluate": {"--model": "timm:test_resnet", "--points": "2", "--seeds": "1", "--limit": "2"},
    "train": {"--epochs": "1", "--views": "1"},
}


def _settings(arguments: list[str]) -> list[str]:
    """Arguments with small settings behind them, which win; files of weights stay."""
    verb = arguments[0]
    if verb not in ("explain", "check", "plan", "compare", "evaluate", "train"):
        return arguments
    settings = {"--model": "resnet18", **_SMALL.get(verb, {}), "--weights": "random"}
    if "/" in dict(pairwise(arguments)).get("--weights", ""):
        settings |= {"--model": "resnet18"}
        del settings["--weights"]
    return [*arguments, *(word for pair in settings.items() for word in pair)]


def _shell(line: str, small: bool, where: str) -> None:
    words = shlex.split(line, comments=True)
    if not words or words[0] in ("pip", "python", "make", "."):  # `test_docs.py` looks whether there is such a thing
        return
    expected = int(re.search(r"# exits with (\d+)", line)[1]) if "# exits with" in line else 0
    if words[0] == "relprop":
        code, said = command(_settings(words[1:]) if small else words[1:])
    else:
        done = subprocess.run(["bash", "-ec", line], check=False, capture_output=True, text=True)
        code, said = done.returncode, done.stdout + done.stderr
    assert code == expected, f"{where}: {line.strip()} ended with {code}, not {expected}:\n{said}"


def command(arguments: list[str]) -> tuple[int, str]:
    """Runs the command in this process: its exit code, and all that it said."""
    from relprop.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


# -- figures --


def figures(page: Path) -> set[str]:
    """The pictures that a page shows, by name."""
    return set(re.findall(r"!\[[^\]]*\]\((?:docs/)?images/([\w.-]+)\)", page.read_text(encoding="utf-8")))


def painted(folder: Path) -> dict[str, Path]:
    """The pictures that a page's code has written, by the name that a page shows them by."""
    return {"-".join(path.relative_to(folder).parts): path for path in folder.rglob("*.png")}


def main(wanted: list[str]) -> None:
    """Paints the pictures of pages anew; of all pages, unless told."""
    os.environ["MPLBACKEND"] = "agg"
    for page in PAGES:
        shown = figures(page) - ELSEWHERE
        if not shown or (wanted and page.name not in wanted):
            continue
        missing = {name for name in re.findall(r'"(\w+)" in os\.environ', page.read_text()) if name not in os.environ}
        if missing:
            print(f"{page.name} needs {', '.join(missing)} to be set; left alone")
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(page, Path(folder), small=False, until=shown)
            for name in sorted(shown):
                shutil.copy(painted(Path(folder))[name], ROOT / "docs/images" / name)
                print(f"docs/images/{name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
