"""The page: Markdown in which every figure comes from the rows beside it.

A block between ``<!-- NAME -->`` and ``<!-- /NAME -->`` is written anew from what a run has measured; all else is
left as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from relprop.errors import RelpropError
from relprop.reproduction import conservation, errors, timing
from relprop.reproduction.answers import answer
from relprop.reproduction.claims import CLAIMS
from relprop.reproduction.tables import by_class, tabulate
from relprop.study import Row, read

__all__ = ["BLOCKS", "refresh", "written"]

_BLOCK = re.compile(r"<!-- (?P<name>[\w-]+) -->\n.*?<!-- /(?P=name) -->", re.S)


class Results:
    """What a run has left in its folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = read(folder)


def refresh(text: str, folder: Path) -> str:
    """A page with its blocks written anew.

    Raises:
        RelpropError: If the folder holds no study, or a block is unknown.
    """
    results = Results(folder)
    return written(text, {name: partial(block, results) for name, block in BLOCKS.items()})


def written(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """A page with its blocks written by these.

    Raises:
        RelpropError: If a block is unknown.
    """

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in blocks:
            raise RelpropError(f"There is no block {name!r}; there are {', '.join(blocks)}.")
        return f"<!-- {name} -->\n{blocks[name]()}\n<!-- /{name} -->"

    return _BLOCK.sub(block, text)


def _claim(name: str) -> Callable[[Results], str]:
    return lambda results: tabulate(CLAIMS[name], results.rows)


def _setup(results: Results) -> str:
    facts = json.loads((results.folder / "manifest.json").read_text())
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return "\n".join(
        [
            f"- model: {facts['source']}",
            f"- hash of all weights: `{facts['weights']}`",
            f"- images: {facts['data']}, {facts['layout']}",
            f"- Python {facts['python']}, {packages}",
            f"- machine: {facts['machine']}",
        ]
    )


BLOCKS: dict[str, Callable[[Results], str]] = {
    **{name: _claim(name) for name in CLAIMS},
    "classes": lambda results: by_class(results.rows, CLAIMS["table2"].lines),
    "conservation": lambda results: conservation.table(conservation.read(results.folder / "conservation.csv")),
    "errors": lambda results: errors.table(errors.read(results.folder / "errors.csv"), results.rows),
    "timing": lambda results: timing.table(results.folder / "timing.json"),
    "setup": _setup,
    "answers": lambda results: answer(results.rows, conservation.read(results.folder / "conservation.csv")),
}
