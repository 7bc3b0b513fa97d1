"""What the result pages say is what their rows say."""

import csv
import re
import runpy
from pathlib import Path

import pytest

from relprop import RelpropError
from relprop.reproduction import birds, choice
from relprop.study import Journal, Row

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def test_the_tables_of_fewer_points_are_those_of_their_rows() -> None:
    with (RESULTS / "points" / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tables = runpy.run_path(str(ROOT / "benchmarks" / "points.py"))["tables"](rows)
    page = (RESULTS / "points" / "README.md").read_text(encoding="utf-8")
    assert len(tables) == 4
    for table in tables.values():
        assert table in page


def test_what_other_pages_repeat_of_the_reproduction_is_what_it_says() -> None:
    page, limits, ties = (
        " ".join(Path("docs", name).read_text().split()) for name in ("reproduction.md", "limits.md", "explain-ties.md")
    )
    gain, loss = re.search(r"ID of \(iv\) by (\S+) \[.*?\] as published and by (\S+) \[", page).groups()
    assert f"{gain} as published, {loss} tie-safe" in limits
    assert f"{gain} as published and by {loss} tie-safe" in ties
    random, none = re.search(r"quantised random map scores (\S+) \[.*?\] as published and (\S+) \[", page).groups()
    assert f"{random} as published and {none} tie-safe" in ties
    for row in (r"the paper's \(iv\), raw", r"\(ii\), raw"):  # its last difference: tie-safe
        mean, low, high = re.search(rf"\| {row} \|[^\n]*?\| (\S+) \[(\S+), (\S+)\] \| \d+ \|", page).groups()
        assert re.search(rf"{mean},? with an interval from {low} to {high}", limits)


def test_the_page_of_the_birds_is_that_of_its_results() -> None:
    page = (RESULTS / "cub" / "README.md").read_text(encoding="utf-8")
    assert "| mean |" in page
    assert birds.refresh(page, RESULTS / "cub") == page


def test_the_page_of_the_preset_is_that_of_its_results() -> None:
    page = (ROOT / "docs" / "preset.md").read_text(encoding="utf-8")
    assert "| relprop: places balanced, two rounds |" in page
    assert "| `relprop` |" in page
    assert choice.refresh(page, RESULTS / "preset") == page


def _row(image: str, method: str, metric: str, value: float, settings: str = "", protocol: str = "tie-safe") -> Row:
    values = (
        {"insertion": value, "deletion": 0.0, "score": value} if metric == "insertion-deletion" else {metric: value}
    )
    known = f"{image} {method} {metric} {protocol} {settings}"
    return Row(known, image, 0, 0, method, metric, protocol if metric == "insertion-deletion" else "", values, {})


def test_methods_of_other_images_are_paired_and_rows_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        found = {"a": 0.5, "b": 0.7, "c": 0.9}
        ours = [_row(image, "relprop", "insertion-deletion", value) for image, value in found.items()]
        theirs = [_row(image, "ii", "insertion-deletion", value) for image, value in {"a": 0.1, "b": 0.3}.items()]
        published = [_row("a", "ii", "insertion-deletion", 0.9, protocol="otsuki2024")]
        others = [_row("a", "centre", "pointing-game", 1.0), _row("a", "relprop", "road", 0.25)]
        journal.add([*ours, *theirs, *published, *others])
    lines = choice.held_out(tmp_path).splitlines()
    assert lines[2] == "| `relprop` | 0.700 | 0.000 | 0.700 |  | 3 |"
    assert lines[3] == "| `ii` | 0.200 | 0.000 | 0.200 | +0.400 [+0.400, +0.400] | 2 |"
    assert lines[5] == "|  | road | ours less its own | pointing-game | ours less its own | n |"
    assert lines[7:] == [
        "| `relprop` | 0.250 |  |  |  | 1 |",
        "| `centre` |  |  | 1.000 |  | 1 |",
    ]
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.add([_row("a", "ii", "insertion-deletion", 0.2, "of more points")])
    with pytest.raises(RelpropError, match="a has two rows of ii, insertion"):
        choice.held_out(tmp_path)
