"""The paper's column for CUB-200-2011: several trainings, their means and standard deviations, and the masks."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from relprop import RelpropError, datasets, weights, zoo
from relprop.cli import main
from relprop.reproduction import CLAIMS
from relprop.reproduction.birds import EVERY_SEED, LOCAL, PAPER, Birds, found, localisation, refresh, table
from relprop.reproduction.work import Work
from relprop.study import Journal, Row, manifest
from relprop.training import Outcome


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Ten birds of ten kinds, all of them for the test, with masks."""
    root = tmp_path / "CUB_200_2011"
    draw = np.random.default_rng(0)
    files = [f"{c:03d}.Bird/Bird_{c}.png" for c in range(1, 11)]
    mask = np.zeros((40, 40), np.uint8)
    mask[10:30, 10:30] = 255
    for file in files:
        colours = Image.fromarray(draw.integers(0, 255, (2, 2, 3), dtype=np.uint8))
        for folder, picture in (("images", colours.resize((40, 40))), ("segmentations", Image.fromarray(mask))):
            (root / folder / file).parent.mkdir(parents=True, exist_ok=True)
            picture.save(root / folder / file)
    for name, values in (
        ("images", files),
        ("image_class_labels", range(1, 11)),
        ("train_test_split", [0] * 10),
        ("classes", [f"{c:03d}.Bird" for c in range(1, 11)]),
    ):
        (root / f"{name}.txt").write_text("".join(f"{i} {value}\n" for i, value in enumerate(values, 1)))
    return root


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


def cells(text: str, label: str, which: int = 0) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in lines[which].strip("|").split("|")]


def row(image: str, method: str, score: float, target: int = 0, metric: str = "insertion-deletion") -> Row:
    protocol = "otsuki2024" if metric == "insertion-deletion" else ""
    numbers = {"insertion": score, "deletion": 0.0, "score": score} if protocol else {metric: score}
    return Row(f"{image} {method} {metric}", image, 0, target, method, metric, protocol, numbers, {})


def test_the_papers_column() -> None:
    assert PAPER.keys() == {line.method for line in CLAIMS["table1"].lines if line.paper}
    for insertion, deletion, score in PAPER.values():
        assert score[0] == pytest.approx(insertion[0] - deletion[0], abs=0.0016)


def test_means_over_images_then_over_trainings() -> None:
    seeds = {
        "seed0": [row("a", "grad-cam", 0.5), row("b", "grad-cam", 0.3), row("a", "paper", 0.4)],
        "seed1": [row("a", "grad-cam", 0.6), row("b", "grad-cam", 0.6, target=1)],
    }
    text = table(seeds)
    ours = cells(text, "Grad-CAM")
    assert ours[1:4] == ["0.508 ± 0.015", "0.055 ± 0.004", "0.453 ± 0.011"]
    assert ours[6] == "0.500 ± 0.141 [0.450, 0.550]"  # of 0.4 and 0.6; of 0.55 and 0.45, by image
    assert ours[-2:] == ["2", "2"]
    assert cells(text, "the paper's (iv), raw, exact conservation")[6:] == ["0.400", "", "", "", "1", "1"]
    assert cells(text, "random map")[-2:] == ["0", "0"]
    assert "classify 75.0 ± 35.4 % of these" in text
    assert table({}).endswith("Nothing has been measured yet.")
    with pytest.raises(RelpropError, match="a grad-cam insertion-deletion otsuki2024 has two rows in seed0"):
        table({"seed0": [row("a", "grad-cam", 0.5), row("a", "grad-cam", 0.4)]})
    local = localisation({"seed0": [row("a", "grad-cam", 0.25, metric="mass-accuracy")]})
    assert cells(local, "Grad-CAM")[2] == "0.250"


def test_every_training_is_measured_the_first_by_all_methods(birds: Path, tmp_path: Path) -> None:
    models = {f"seed{seed}": lambda seed=seed: tiny.model(seed) for seed in range(2)}
    settings = {"points": 3}
    work = Work(None, datasets.open(birds), 2, 1, 2, tmp_path / "out", settings)
    text = Birds(models, work)()
    assert not work.failures
    assert cells(text, "the paper's (iv), raw")[-2:] == ["2", "2"]
    assert cells(text, "Guided BackPropagation")[-2:] == ["1", "2"]
    local = cells(text, "the paper's (iv), raw", 1)
    assert len(local) == 1 + len(LOCAL) + 2
    assert all(" ± " in cell for cell in local[1:-2])
    assert (tmp_path / "out" / "table1.md").read_text().strip() == text
    seen = (tmp_path / "out" / "seed1" / "manifest.json").read_text()
    assert all(f'"{name}"' in seen for name in EVERY_SEED)
    other = Work(None, datasets.open(birds), 2, 1, 2, tmp_path / "no")
    wrong = Birds({"seed0": lambda: replace(tiny.model(), outputs=9)}, other)
    with pytest.raises(RelpropError, match="has 9 classes and CUB_200_2011 has 10"):
        wrong()


def test_a_page_has_the_trainings_and_the_tables(tmp_path: Path) -> None:
    for seed in (0, 1):
        outcome = Outcome(seed, Path("weights.safetensors"), 9, 3, 1.0, 0.5, 2.0, 0.25 + 0.5 * seed)
        (tmp_path / "head" / f"seed{seed}").mkdir(parents=True)
        manifest.write(tmp_path / "head" / f"seed{seed}", {"outcome": asdict(outcome)})
        with Journal(tmp_path / "table1" / f"seed{seed}" / "journal.sqlite") as journal:
            journal.add([row("a", "grad-cam", 0.5 + seed), row("a", "grad-cam", 0.25, metric="mass-accuracy")])
    page = tmp_path / "README.md"
    names = ("head", "table1", "localisation")
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    assert code("reproduce", "page", "--dataset", "cub", "--out", str(tmp_path)) == 0
    text = page.read_text()
    assert cells(text, "mean")[-1] == "0.5000 ± 0.3536"
    assert cells(text, "Grad-CAM")[6] == "1.000 ± 0.707"
    assert cells(text, "Grad-CAM", 1)[2] == "0.250 ± 0.000"
    assert refresh(text, tmp_path) == text


def test_the_networks_of_a_training_are_found(tmp_path: Path) -> None:
    for seed in (1, 0):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}" / "weights.safetensors").write_bytes(b"")
    assert list(found(tmp_path)) == ["seed0", "seed1"]
    assert list(found(tmp_path / "seed1" / "weights.safetensors")) == ["seed1"]
    (tmp_path / "mine.safetensors").write_bytes(b"")
    assert list(found(tmp_path / "mine.safetensors")) == ["seed0"]


def test_the_verb(birds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["reproduce", "table1", "--dataset", "cub", "--data", str(birds)]
    for more, said in (
        ([], "pass --weights with what relprop train wrote"),
        (["--weights", str(tmp_path)], "There are no trained networks in"),
    ):
        assert code(*ask, *more) == 2
        assert said in capsys.readouterr().err
    assert code("reproduce", "table2", "--dataset", "cub") == 2
    assert "there are table1 and page, and no 'table2'" in capsys.readouterr().err
    module = zoo.load("resnet18", "random").module
    module.fc = torch.nn.Linear(512, 9)
    (tmp_path / "seed0").mkdir()
    path = tmp_path / "seed0" / "weights.safetensors"
    path.write_bytes(weights.serialised(module.state_dict(), {}))
    assert code(*ask, "--model", "resnet18", "--weights", str(tmp_path), "--out", str(tmp_path / "out")) == 2
    assert "The network of seed0 has 9 classes" in capsys.readouterr().err
