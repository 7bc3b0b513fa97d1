"""Merging: the rows of several runs in one folder, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relprop.errors import RelpropError
from relprop.study import manifest
from relprop.study.journal import JOURNAL, PRODUCT, Journal, product
from relprop.study.output import Output

__all__ = ["Merged", "Source", "merge"]

_SHARED = ("model", "source", "weights", "data", "layout", "precision")


class Source(NamedTuple):
    """A run that rows came from.

    Attributes:
        folder: Its folder.
        rows: How many rows it has.
        added: How many of them no run before it had.
    """

    folder: Path
    rows: int
    added: int


class Merged(NamedTuple):
    """What merging made.

    Attributes:
        rows: How many rows there are now.
        sources: Where they came from.
        note: Why there is no Parquet file, or None.
    """

    rows: int
    sources: tuple[Source, ...]
    note: str | None


def merge(runs: Sequence[Path], out: Path) -> Merged:
    """Joins the journals of runs, such as the shards of a study.

    Rows are known by what they were computed from, so the same row from two runs is one row. What a table could not
    tell apart is refused before anything is written: other weights, or other settings of the same metric.

    Args:
        runs: The folders of studies.
        out: The folder for all of them; rows that are there already stay, and count as a run.

    Raises:
        RelpropError: If a folder holds no study, or the runs do not belong together.
    """
    if far := [str(folder) for folder in (*runs, out) if folder.parts and folder.parts[0].endswith(":")]:
        raise RelpropError(f"{far[0]} is a URL, and only folders can be merged; relprop table reads the rows there.")
    folders = {folder.resolve(): folder for folder in runs}
    missing = [folder for folder in folders.values() if not _holds(folder)]
    if missing:
        raise RelpropError(f"{missing[0]} holds no study; relprop evaluate ... --out {missing[0]} makes one.")
    folders.pop(out.resolve(), None)
    every = [*([out] if _holds(out) else []), *folders.values()]
    manifests = {folder: manifest.read(folder) for folder in every}
    _check_settings(manifests)
    _check_rows(every)
    sources = []
    with Output(out).journal() as journal:
        for folder in every:
            with _rows(folder) as part:
                count = len(part)
                sources.append(Source(folder, count, count if folder is out else journal.add(part)))
        note = journal.export(out / PRODUCT)
        images = len({row.image for row in journal.brief()})
        manifest.write(out, _described(sources, manifests, len(journal), images))
        return Merged(len(journal), tuple(sources), note)


def _holds(folder: Path) -> bool:
    return (folder / JOURNAL).exists() or (folder / PRODUCT).exists()


def _rows(folder: Path) -> Journal:
    """A study's rows; where its product alone is there, as in a folder of results, a copy of those in memory."""
    if (folder / JOURNAL).exists():
        return Output(folder).journal()
    made = Output(None).journal()
    made.add(product(folder))
    return made


def _requests(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All that was ever asked for in a folder: the manifest, what it was before, and what was merged into it."""
    yield facts
    for earlier in facts.get("history", []):
        yield from _requests(earlier)
    for source in facts.get("sources", []):
        yield from _requests(source["manifest"])


def _check_settings(manifests: Mapping[Path, Mapping[str, Any]]) -> None:
    """Refuses runs that say that their rows do not belong together."""
    seen: dict[str, tuple[str, Path]] = {}
    for folder, facts in manifests.items():
        for request in _requests(facts):
            told = {"the weights": request["weights"]} if request.get("weights") else {}
            for metric, settings in request.get("metric settings", {}).items():
                told[metric] = json.dumps({**settings, "precision": request.get("precision")}, sort_keys=True)
            for what, value in told.items():
                before, where = seen.setdefault(what, (value, folder))
                if before != value:
                    raise RelpropError(
                        f"{where} and {folder} differ in {what} ({before[:80]} and {value[:80]}), which a table would "
                        "mix; keep them apart."
                    )


def _check_rows(folders: Sequence[Path]) -> None:
    """Refuses rows that say different things of the same: manifests may be lost, or older than what they tell."""
    seen: dict[tuple[str, ...], tuple[str, Path]] = {}
    for folder in folders:
        with _rows(folder) as journal:
            for row in journal.brief():
                what = (row.image, row.method, row.metric, row.protocol)
                before, where = seen.setdefault(what, (row.key, folder))
                if before != row.key:
                    raise RelpropError(
                        f"{where} and {folder} have different rows of {row.method} for {row.image} "
                        f"({' '.join(what[2:]).strip()}), of other settings or weights, which a table would mix; keep "
                        "them apart."
                    )


def _described(
    sources: Sequence[Source], manifests: Mapping[Path, Mapping[str, Any]], rows: int, images: int
) -> dict[str, Any]:
    """The manifest of a merged study, with those of its sources."""
    every = [request for source in sources for request in _requests(manifests[source.folder])]
    return {
        "command": manifest.command(),
        "merged": manifest.now(),
        **{name: next((r[name] for r in every if name in r), None) for name in _SHARED},
        "images": images,
        **{name: sorted({each for r in every for each in r.get(name, [])}) for name in ("methods", "metrics")},
        **manifest.surroundings(),
        "rows": rows,
        "sources": [
            {"folder": str(s.folder), "rows": s.rows, "added": s.added, "manifest": manifests[s.folder]}
            for s in sources
        ],
    }
