"""The manifest: what a study was run with, and what it was run with before."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["FILE", "begin", "command", "now", "read", "surroundings", "write"]

FILE = "manifest.json"
PACKAGES = ("relprop", "torch", "torchvision", "captum", "zennit", "grad-cam", "numpy", "pillow")

_PASSING = {"started", "finished", "stopped", "rows", "failures", "notes", "engine", "runs", "history"}
"""What may differ between two runs of the same request."""


def now() -> str:
    """The time, for people and machines."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def command() -> str:
    """What was typed, as a shell would take it again."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def surroundings() -> dict[str, Any]:
    """What it runs on."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:  # noqa: PERF203 - an extra that is not there
            continue
    return {
        "python": platform.python_version(),
        "packages": packages,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }


def read(folder: Path) -> dict[str, Any]:
    """The manifest in a folder; empty where there is none that can be read."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def begin(folder: Path | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run that begins; what was run in its folder before becomes its history.

    Runs of the same request, such as those of a study that was killed and continued, are one entry that tells how many
    they were.
    """
    earlier = {} if folder is None else read(folder)
    history: list[dict[str, Any]] = list(earlier.pop("history", []))
    if earlier and history and _request(history[-1]) == _request(earlier):
        last = history.pop()
        history.append({**last, **earlier, "started": last.get("started"), "runs": last.get("runs", 1) + 1})
    elif earlier:
        history.append(earlier)
    return {**facts, **({"history": history} if history else {})}


def write(folder: Path | None, facts: Mapping[str, Any]) -> None:
    """Writes a manifest, whole or not at all."""
    if folder is None:
        return
    partial = folder / "manifest.partial"
    partial.write_text(json.dumps(facts, indent=2, default=str) + "\n")
    partial.replace(folder / FILE)


def _request(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in _PASSING}
