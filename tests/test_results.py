"""What the result pages say is what their rows say."""

import csv
import runpy
from pathlib import Path

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
