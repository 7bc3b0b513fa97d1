"""Studies: rows that survive, resume and agree; tables that say how sure they are."""

import csv
import io
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relprop import RelpropError, insertion_deletion, methods, zoo
from relprop.cli import main
from relprop.study import Journal, Row, estimate, evaluate, tabulate

METHODS = ["paper", "random+hq"]
SCRIPT = """
import sys
from relprop import zoo
from relprop.study import evaluate
model = zoo.load("resnet18", "random")
evaluate(model, sys.argv[1], methods={methods!r}, protocol="both", points=3, seeds=1, out=sys.argv[2], batch_size=2)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for label in range(2):
        (root / f"class-{label}").mkdir()
        for i in range(3):
            pixels = draw.integers(0, 255, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((240, 240)).save(root / f"class-{label}" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def model() -> zoo.Model:
    return zoo.load("resnet18", "random")


def rows_of(folder: Path) -> list[tuple[str, str, str, str, dict[str, float]]]:
    with Journal(folder / "journal.sqlite") as journal:
        return [(r.image, r.method, r.metric, r.protocol, dict(r.values)) for r in journal]


def rows_in(folder: Path) -> int:
    if not (folder / "journal.sqlite").exists():
        return 0
    with Journal(folder / "journal.sqlite") as journal:
        return len(journal)


def test_a_study_measures_every_method_on_every_image_once(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    settings = {"points": 5, "seeds": 1, "out": tmp_path, "progress": lambda *now: seen.append(now)}
    study = evaluate(model, photos, METHODS[:1], protocol="tie-safe", limit=2, **settings)
    assert len(study.rows) == 2
    assert seen[-1] == (2, 2)
    before = (tmp_path / "journal.sqlite").stat().st_mtime_ns
    evaluate(model, photos, METHODS[:1], protocol="tie-safe", limit=2, **settings)
    assert (tmp_path / "journal.sqlite").stat().st_mtime_ns == before  # nothing was left to write
    more = evaluate(model, photos, METHODS[:2], ["insertion-deletion", "sparseness"], limit=2, **settings)
    assert len(more.rows) == 8
    assert {r.key for r in study.rows} <= {r.key for r in more.rows}
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra 'study' brings pyarrow")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.num_rows == 8
    assert {"score", "insertion curve", "sparseness"} <= set(table.column_names)


def test_an_image_that_cannot_be_read_is_named_and_costs_no_other(
    model: zoo.Model, photos: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "data"
    (broken / "a").mkdir(parents=True)
    for i, path in enumerate(sorted(photos.rglob("*.png"))[:2]):
        (broken / "a" / f"{i}.png").write_bytes(path.read_bytes())
    (broken / "a" / "2.png").write_bytes(b"not an image")
    study = evaluate(model, broken, ["random"], ["sparseness"])
    assert len(study.rows) == 2
    assert len(study.failures) == 1
    assert "2.png" in next(iter(study.failures.values()))


def test_killed_at_random_moments_and_continued_it_ends_the_same(photos: Path, tmp_path: Path) -> None:
    script = SCRIPT.format(methods=METHODS)

    def start(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", script, str(photos), str(folder)])

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole).wait() == 0
    draw = random.Random(0)
    for stop in (0, 4, 8, 14):  # killed when so many rows are there, or a moment later
        process = start(broken)
        while process.poll() is None and rows_in(broken) < stop + 1:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert rows_in(broken) < len(rows_of(whole))
    assert start(broken).wait() == 0
    for mine, theirs in zip(rows_of(broken), rows_of(whole), strict=True):
        assert mine[:4] == theirs[:4]
        assert mine[4] == pytest.approx(theirs[4], abs=1e-5)
    tables = []
    for folder in (whole, broken):
        with Journal(folder / "journal.sqlite") as journal:
            tables.append(str(tabulate(journal, "random+hq")))
    assert tables[0] == tables[1]


def test_rows_tell_the_score_of_the_other_class_too(model: zoo.Model, photos: Path) -> None:
    study = evaluate(model, photos, ["paper"], protocol="both", limit=2, points=5, seeds=1)
    assert all(row.label != row.target for row in study.rows)  # an untrained net's guesses among 1,000
    for row in study.rows:
        x = model.prepare(next(photos.rglob(row.image)))[None]
        maps = methods.get("paper+sum")(model, x, row.target)
        published = {"protocol": "otsuki2024"} if row.protocol == "otsuki2024" else {"seeds": 1}
        for scored, name in ((row.label, "true"), (row.target, "explained")):
            alone = insertion_deletion(model, x, maps, scored=scored, points=5, **published)
            mine = (name == "true") == (row.protocol == "otsuki2024")
            number = row.values["score" if mine else f"score of the {name} class"]
            assert number == pytest.approx(float(alone.score), abs=1e-4)


def test_two_halves_merge(tmp_path: Path) -> None:
    rows = [Row(f"k{i}", f"{i}.png", 0, 0, "paper", "m", "", {"score": i / 10}) for i in range(4)]
    with Journal(tmp_path / "a") as a, Journal(tmp_path / "b") as b:
        a.add(rows[:3])
        b.add(rows[1:])
        a.add(b)
        assert len(a) == 4
        assert sorted(r.key for r in a) == [r.key for r in rows]


def test_a_batch_of_rows_is_all_or_nothing(tmp_path: Path) -> None:
    def rows() -> object:
        yield Row("k", "i.png", None, 0, "paper", "m", "", {"score": 1.0})
        raise KeyboardInterrupt

    with Journal(tmp_path / "j") as journal:
        with pytest.raises(KeyboardInterrupt):
            journal.add(rows())
        assert len(journal) == 0


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"some text that is no database, but long enough to be looked at" * 50)
    with pytest.raises(RelpropError, match="cannot be opened"):
        Journal(tmp_path / "j")


def test_the_interval_holds_the_mean_and_narrows_with_more_images() -> None:
    draw = np.random.default_rng(0)
    few, many = estimate(draw.normal(size=20)), estimate(draw.normal(size=2000))
    for e in (few, many):
        assert e.low < e.mean < e.high
    assert many.high - many.low < (few.high - few.low) / 5
    # For a normal mean, 95 % lie within 1.96 standard errors.
    assert many.high - many.low == pytest.approx(2 * 1.96 / 2000**0.5, rel=0.1)


def test_differences_are_paired() -> None:
    rows = [
        Row(f"{m}{i}", f"{i}.png", 0, 0, m, "insertion-deletion", "tie-safe", {"score": i + (0.5 if m == "a" else 0.0)})
        for m in ("a", "b")
        for i in range(30)
    ]
    table = tabulate(rows, "b")
    cell = ("tie-safe", "score")
    difference = table.differences["a", cell]
    assert (difference.low, difference.mean, difference.high) == pytest.approx((0.5, 0.5, 0.5))
    assert table.cells["a", cell].high - table.cells["a", cell].low > 1  # unpaired, nothing could be said
    assert ("b", cell) not in table.differences
    text = table.to("markdown")
    assert "0.500 [0.500, 0.500]" in text
    assert table.to("latex").count("\\\\") == 3
    lines = list(csv.DictReader(io.StringIO(table.to("csv"))))
    assert [line["method"] for line in lines] == ["a", "b"]
    assert float(lines[0]["mean difference"]) == pytest.approx(0.5)


def test_bad_requests_get_one_sentence(model: zoo.Model, photos: Path) -> None:
    for bad, words in (
        ({"methods": ["grad-kam"]}, "no method 'grad-kam'; the nearest are grad-cam"),
        ({"metrics": ["beauty"]}, "no metric 'beauty'"),
        ({"protocol": "mine"}, "no protocol 'mine'"),
    ):
        with pytest.raises(RelpropError, match=words):
            evaluate(model, photos, **bad)
    with pytest.raises(RelpropError, match=r"pass what relprop\.load returns"):
        evaluate(model.module, photos)
    with pytest.raises(RelpropError, match="no rows"):
        tabulate([])


def test_the_verbs_of_a_shell(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def relprop(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    asked = ("--model", "resnet18", "--weights", "random", "--metrics", "sparseness", "--limit", 2, "--out", tmp_path)
    code, out, err = relprop("evaluate", photos, "--methods", "random,centre", *asked)
    assert code == 0, err
    assert "| random | " in out
    code, out, _ = relprop("table", tmp_path, "--reference", "centre", "--format", "csv")
    assert code == 0
    assert [row["method"] for row in csv.DictReader(io.StringIO(out))] == ["centre", "random"]
    code, out, err = relprop("table", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert "holds no study" in err
    code, out, _ = relprop("evaluate", photos, "--methods", "grad-kam", *asked)
    assert (code, out) == (2, "")
    code, out, _ = relprop("methods")
    assert code == 0
    assert len(out.splitlines()) > 30
