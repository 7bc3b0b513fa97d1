"""What the result pages say is what their rows say."""

import csv
import runpy
from pathlib import Path

from relprop.reproduction import birds, choice

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


def test_the_page_of_the_birds_is_that_of_its_results() -> None:
    page = (RESULTS / "cub" / "README.md").read_text(encoding="utf-8")
    assert "| mean |" in page
    assert birds.refresh(page, RESULTS / "cub") == page


def test_the_page_of_the_preset_is_that_of_its_results() -> None:
    page = (ROOT / "docs" / "preset.md").read_text(encoding="utf-8")
    assert "| relprop (beta 4) |" in page
    assert "| `relprop` |" in page
    assert choice.refresh(page, RESULTS / "preset") == page
