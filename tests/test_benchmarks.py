"""The benchmarks run; what they measure is for a quiet machine, and for a person to read."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SECTIONS = ("cost", "growth", "memory", "first", "profile", "metrics")
ROWS = {
    "cost": [
        "relprop** `paper` |",
        "relprop** `paper`, `recompute=True`",
        "relprop** `epsilon`",
        "each further target",
        "gradient",
        "grad-cam",
        "captum",
        "zennit",
    ],
    "growth": ["images in a batch", "pixels a side", "layers of the ResNet", "targets of one image", "images in a row"],
    "memory": [
        "activations that a forward pass keeps",
        "peak of `paper` |",
        "peak of `paper`, `recompute=True`",
        "images explained one by one",
    ],
    "first": ["import relprop", "relprop.plan", "first `relprop.explain`", "relprop --help"],
    "profile": [
        "true conv",
        "positive conv",
        "transposed conv",
        "divisions",
        "splits",
        "ledger",
        "joins",
        "state",
        "else",
    ],
    "metrics": ["202 plain", "101 points", "26 points", "adaptive", "quantised map", "Score-CAM", "images a second"],
}


def bench(*args: object) -> str:
    ask = [sys.executable, BENCHMARKS / "bench.py", *map(str, args)]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_prints_all_its_rows_and_writes_them_into_its_block(section: str, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    shutil.copy(BENCHMARKS / "README.md", page)
    before = page.read_text(encoding="utf-8")
    said = bench("--quick", "--only", section, "--save", tmp_path)
    for row in ROWS[section]:
        assert row in said
    assert "**pass**" not in said
    assert "**miss**" not in said
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(found) == [section]
    assert found[section]["about"]["seed"] == 0
    after = page.read_text(encoding="utf-8")
    assert blocks(after)[section] in said
    others = blocks(before) | {section: blocks(after)[section]}
    assert blocks(after) == others
    assert (tmp_path / "growth.png").exists() == (section == "growth")


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    for file in BENCHMARKS.glob("*.[mj]*"):
        shutil.copy(file, tmp_path)
    bench("--page", tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page == (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert set(blocks(page)) == set(SECTIONS)


def blocks(page: str) -> dict[str, str]:
    return {found[1]: found[2] for found in re.finditer(r"<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->", page, re.S)}
