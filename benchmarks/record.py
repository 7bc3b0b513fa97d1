"""What a run has measured, in a file, and the page whose blocks are written from it.

A block between ``<!-- NAME -->`` and ``<!-- /NAME -->`` is written anew from the section of that name; where that has
not been measured, and outside of blocks, the page is left as it was.
"""

import datetime
import json
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cost
import first
import footprint
import growth
import growth_figure
import parts
import scoring
import torch
from subject import SEED

SECTIONS: dict[str, Any] = {
    "cost": cost,
    "growth": growth,
    "memory": footprint,
    "first": first,
    "profile": parts,
    "metrics": scoring,
}
"""By its name: a module with Settings, QUICK, measure and table."""
TITLES = {
    "cost": "Cost in forward passes",
    "growth": "How cost grows",
    "memory": "Memory",
    "first": "Before the first explanation",
    "profile": "Where the time goes",
    "metrics": "What measures cost",
}
PACKAGES = ("relprop", "torch", "torchvision", "captum", "zennit", "grad-cam", "numpy")
FILE, PAGE, FIGURE = "results.json", "README.md", "growth.png"

_BLOCK = re.compile(r"<!-- (?P<name>[\w-]+) -->\n.*?<!-- /(?P=name) -->", re.S)


def measured(name: str, quick: bool) -> dict[str, Any]:
    """Run a section: what it found, and where and when."""
    section = SECTIONS[name]
    found = section.measure(section.QUICK if quick else section.Settings())
    return {"about": about(), "quick": quick, **found}


def about() -> dict[str, Any]:
    """Where and when something was measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def processor() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def shown(name: str, data: dict[str, Any]) -> str:
    """A section as Markdown."""
    facts = data["about"]
    packages = ", ".join(f"{package} {number}" for package, number in facts["packages"].items())
    where = f"{facts['processor']}, {facts['cores']} cores" + (f", {facts['cuda']}" if facts["cuda"] else "")
    how = f"{facts['threads']} threads · seed {facts['seed']}"
    run = f"*{facts['date']} · {where} · {how} · Python {facts['python']}, {packages}*"
    quick = "A quick run: it shows that the script works, and its figures mean nothing.\n\n" if data["quick"] else ""
    return f"{quick}{run}\n\n{SECTIONS[name].table(data)}"


def read(folder: Path) -> dict[str, Any]:
    """The sections that a folder has, by name."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(folder: Path, name: str, data: dict[str, Any]) -> None:
    """Put a section into the folder's file, beside what is there."""
    sections = read(folder) | {name: data}
    ordered = {each: sections[each] for each in SECTIONS if each in sections}
    (folder / FILE).write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def refresh(text: str, sections: dict[str, Any]) -> str:
    """A page with the blocks of the measured sections written anew."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- {name} -->\n{shown(name, sections[name])}\n<!-- /{name} -->" if name in sections else found[0]

    return _BLOCK.sub(block, text)


def write(folder: Path) -> None:
    """Write the folder's page and figure from its file."""
    sections, page = read(folder), folder / PAGE
    if "growth" in sections:
        growth_figure.draw(sections["growth"], folder / FIGURE)
    if page.exists():
        page.write_text(refresh(page.read_text(encoding="utf-8"), sections), encoding="utf-8")
