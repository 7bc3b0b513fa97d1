"""The paper's tables and figures: every figure comes from rows, every category from a stated criterion."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from relprop import RelpropError, datasets, zoo
from relprop.cli import main
from relprop.reproduction import CLAIMS, conservation, errors, tabulate
from relprop.reproduction.answers import answer
from relprop.reproduction.page import BLOCKS, refresh
from relprop.reproduction.tables import by_class, values
from relprop.study import Journal, Row


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for label in range(2):
        (root / f"{label}").mkdir()
        for i in range(2):
            pixels = draw.integers(0, 255, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((240, 240)).save(root / f"{label}" / f"{label}{i}.png")
    return root


@pytest.fixture(scope="module")
def model() -> zoo.Model:
    return zoo.load("resnet18", "random")


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


def row(image: str, method: str, protocol: str, score: float, other: float = 0.0) -> Row:
    second = "explained" if protocol == "otsuki2024" else "true"
    numbers = {"insertion": score + 0.1, "deletion": 0.1, "score": score, f"score of the {second} class": other}
    return Row(f"{image} {method} {protocol}", image, 0, 0, method, "insertion-deletion", protocol, numbers, {})


def rows(method: str, published: list[float], tie_safe: list[float]) -> list[Row]:
    return [
        row(f"{i}.png", method, protocol, score, score - 0.1)
        for protocol, scores in (("otsuki2024", published), ("tie-safe", tie_safe))
        for i, score in enumerate(scores)
    ]


def cells(table: str, label: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_printed_ids_are_the_printed_differences() -> None:
    lines = [line for claim in CLAIMS.values() for line in claim.lines if line.paper]
    assert len(lines) > 15
    for line in lines:
        insertion, deletion, score = line.paper or (0, 0, 0)
        assert score == pytest.approx(insertion - deletion, abs=0.0016), line


def test_a_table_has_the_papers_figures_ours_and_the_paired_difference() -> None:
    measured = rows("released+hq-released", [0.5, 0.7], [0.2, 0.4]) + rows("released", [0.4, 0.4], [0.3, 0.6])
    table = tabulate(CLAIMS["table2"], measured)
    ours = cells(table, "(iv) ratio, identity skips in")
    assert ours[1:4] == ["0.563", "0.018", "0.545"]
    assert ours[4:6] == ["0.700", "0.100"]
    assert ours[6].startswith("0.600 [")
    assert ours[9].startswith("0.300 [")
    assert ours[10].startswith("0.200 [")
    assert ours[11].startswith("-0.150 [")
    assert ours[12] == "2"
    assert cells(table, "(iv), raw")[10:] == ["", "", "2"]
    assert set(cells(table, "(i), raw")[1:]) == {"", "0"}
    assert "centred Gaussian" in table


def test_the_other_class_stands_beside() -> None:
    table = by_class(rows("grad-cam", [0.5, 0.5], [0.2, 0.2]), CLAIMS["table1"].lines)
    means = [cell.partition(" ")[0] for cell in cells(table, "Grad-CAM")[1:]]
    assert means == ["0.500", "0.400", "0.200", "0.100", "2"]


def test_failures_are_those_not_above_the_best_baseline_the_lowest_first() -> None:
    found = values(
        rows("released+hq-released", [0.5, 0.1, 0.3], [0] * 3)
        + rows("grad-cam", [0.2, 0.4], [0] * 2)
        + rows("score-cam", [0.1], [0])
    )
    assert errors.threshold(found) == pytest.approx(0.3)
    assert list(errors.failed(found)) == ["1.png", "2.png"]
    with pytest.raises(RelpropError, match="No baseline"):
        errors.threshold({})


@pytest.mark.parametrize(
    ("hot", "box", "category"),
    [
        ((slice(0, 2), slice(0, 2)), (slice(0, 6), slice(0, 6)), "Insufficiently Attended"),
        ((slice(0, 6), slice(0, 6)), (slice(0, 5), slice(0, 5)), "Over-Attended"),
        ((slice(6, 9), slice(6, 9)), (slice(0, 5), slice(0, 5)), "Wrongly Attended"),
    ],
)
def test_categories(hot: tuple[slice, slice], box: tuple[slice, slice], category: str) -> None:
    heat, inside = torch.zeros(10, 10), torch.zeros(10, 10, dtype=torch.bool)
    heat[hot], inside[box] = 1.0, True
    found = errors.sort(heat, inside)
    assert found["category"] == category
    assert found["attended"] == pytest.approx(float(heat.mean()))
    assert found["object"] == pytest.approx(float(inside.double().mean()))
    assert found["inside"] == pytest.approx(float(heat[inside].sum() / heat.sum()))
    assert errors.sort(torch.ones(10, 10), inside)["category"] == "Wrongly Attended"  # nothing stands out


def test_failures_round_trip(tmp_path: Path) -> None:
    failures = [errors.Failure("a.png", 0.1, 0.2, 0.3, 0.4, errors.OVER)]
    errors.write(failures, tmp_path / "errors.csv")
    assert errors.read(tmp_path / "errors.csv") == failures
    measured = rows("released+hq-released", [0.1, 0.5], [0] * 2) + rows("grad-cam", [0.2, 0.2], [0] * 2)
    assert cells(errors.table(failures, measured), "here")[1:] == ["50.0%", "0", "1", "0", "1", "2", "0 of 1"]
    wrong = [replace(row, target=7) for row in measured]
    assert cells(errors.table(failures, wrong), "here")[-1] == "1 of 1"


def test_sums_of_the_presets(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    found = list(conservation.sums(model, datasets.open(photos).first(), 2))
    assert len(found) == 2 * 6
    conservation.write(found, tmp_path / "sums.csv")
    assert conservation.read(tmp_path / "sums.csv") == found
    for sums in found:
        if sums["method"] == "paper":
            for place in conservation.PLACES:
                assert sums[place] == pytest.approx(sums["probability"], rel=1e-5)
    assert {len(sums) for sums in found if sums["method"] == "captum-lrp"} == {4}
    conservation.plot(found, tmp_path / "sums.png")
    assert cells(conservation.table(found), conservation.PRESETS["paper"])[-1] == "2"
    text = answer(rows("released", [0.5], [0.4]), found)
    assert len(re.findall(r"^\d\. ", text, re.M)) == 9
    few = answer(rows("paper", [0.5] * 3, [0.5] * 3) + rows("paper-folded", [0.4] * 2, [0.4] * 2), found)
    assert "folded -0.100 [-0.100, -0.100] on 2 images." in few


def test_the_first_file_of_every_class(photos: Path) -> None:
    assert [sample.path.name for sample in datasets.open(photos).first()] == ["00.png", "10.png"]


def test_the_verb_measures_prints_and_continues(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["reproduce", "norms", "--data", str(photos), "--model", "resnet18", "--weights", "random"]
    assert code(*ask, "--limit", "1", "--out", str(tmp_path)) == 0
    table = capsys.readouterr().out
    assert cells(table, "passed through")[-1] == "1"
    assert (tmp_path / "norms.md").read_text().strip() in table
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- norms -->\nold\n<!-- /norms -->\nafter\n")
    assert code("reproduce", "page", "--page", str(page), "--out", str(tmp_path)) == 0
    assert page.read_text().startswith("before\n<!-- norms -->\n|")
    assert page.read_text().endswith("|\n<!-- /norms -->\nafter\n")
    assert (tmp_path / "norms.md").read_text().strip() in page.read_text()
    assert json.loads((tmp_path / "manifest.json").read_text())["images"] == 1


def test_figures_need_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--model", "resnet18", "--weights", "random", "--out", str(tmp_path)]
    assert code("reproduce", "splitting", *ask) == 0
    assert Path(capsys.readouterr().out.split()[-1]) == tmp_path / "splitting.png"
    with Image.open(tmp_path / "splitting.png") as picture:
        assert picture.width > 2 * picture.height


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["table1"], "pass --data DIR"),
        (["all"], "pass --data DIR"),
        (["table9"], "There is no 'table9'"),
        (["page", "--page", "nowhere.md"], "There is no page"),
    ],
)
def test_bad_requests_get_one_sentence(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code("reproduce", *asked) == 2
    sentence = capsys.readouterr().err.strip()
    assert said in sentence
    assert "\n" not in sentence


def test_a_block_that_is_unknown_or_has_no_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match="holds no study"):
        refresh("", tmp_path)
    Journal(tmp_path / "journal.sqlite").add([])
    with pytest.raises(RelpropError, match="no block 'nothing'"):
        refresh("<!-- nothing -->\n<!-- /nothing -->", tmp_path)
    assert {"table1", "table2", "table3", "rules", "conservation", "errors", "timing", "answers"} <= BLOCKS.keys()


def test_the_page_says_what_the_rows_say() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "reproduction.md").read_text()
    assert refresh(page, root / "results" / "imagenet") == page
    for picture in re.findall(r"\]\((images/.*?)\)", page):
        assert (root / "docs" / picture).is_file()
