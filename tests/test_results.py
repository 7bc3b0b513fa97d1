"""What the result pages say is what their rows say."""

import csv
import runpy
from pathlib import Path

import pytest

from relprop.study import Journal, tabulate

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


@pytest.mark.parametrize("rows", sorted(RESULTS.glob("*/journal.sqlite")), ids=lambda rows: rows.parent.name)
def test_the_table_on_the_page_is_that_of_its_rows(rows: Path, tmp_path: Path) -> None:
    copy = tmp_path / "journal.sqlite"  # opening a journal may write beside it
    copy.write_bytes(rows.read_bytes())
    with Journal(copy) as journal:
        table = str(tabulate(journal, None, ["insertion", "deletion", "score"]))
    assert table in rows.with_name("README.md").read_text(encoding="utf-8")


def test_the_tables_of_fewer_points_are_those_of_their_rows() -> None:
    with (RESULTS / "points" / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tables = runpy.run_path(str(ROOT / "benchmarks" / "points.py"))["tables"](rows)
    page = (RESULTS / "points" / "README.md").read_text(encoding="utf-8")
    assert len(tables) == 4
    for table in tables.values():
        assert table in page
