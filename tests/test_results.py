"""What the result pages say is what their rows say."""

from pathlib import Path

import pytest

from relprop.study import Journal, tabulate

RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*/README.md")), ids=lambda page: page.parent.name)
def test_the_table_on_the_page_is_that_of_its_rows(page: Path, tmp_path: Path) -> None:
    copy = tmp_path / "journal.sqlite"  # opening a journal may write beside it
    copy.write_bytes((page.parent / "journal.sqlite").read_bytes())
    with Journal(copy) as journal:
        table = str(tabulate(journal, None, ["insertion", "deletion", "score"]))
    assert table in page.read_text(encoding="utf-8")
