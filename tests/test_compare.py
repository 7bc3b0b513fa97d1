"""Comparisons: the scores are the metric's, the pictures show the maps, and what fails is named."""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from relprop import RelpropError, images, insertion_deletion, load, methods
from relprop.cli import main
from relprop.cli_compare import FILES
from relprop.compare import PROTOCOLS, Comparison, compare
from relprop.compare_figure import SIDE, curves, grid, layout
from relprop.figure import glow, limit
from relprop.methods import Method

NORMALIZATION = ([0.5] * 3, [0.25] * 3)
METHODS = ("paper", "paper+hq", "guided-backprop", "random")
SMALL = ("--model", "resnet18", "--weights", "random", "--points", 3)


class Net(nn.Module):
    """A residual block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.first, self.second = nn.ReLU(), nn.ReLU()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        return self.head(self.second(x + self.body(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
    return model


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def comparison(net: nn.Module, x: Tensor) -> Comparison:
    return compare(net, x, METHODS, true=3, points=5, seeds=2, normalization=NORMALIZATION)


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def own(run: Callable[..., Tensor], name: str = "own", cost: float = 4) -> Method:
    return Method(name, "control", "none", cost, "a test", run, spatial=True)


# -- what is computed --


def test_scores_are_those_of_the_metric(net: nn.Module, x: Tensor, comparison: Comparison) -> None:
    assert comparison.methods == METHODS
    output = net(x).softmax(1)[0].detach()
    assert comparison.target == int(output.argmax()) != 3
    assert comparison.probability == pytest.approx(float(output.max()), abs=1e-6)
    assert {protocol: comparison.scored(protocol) for protocol in PROTOCOLS} == {
        "otsuki2024": 3,
        "tie-safe": comparison.target,
    }
    rows = list(comparison.rows())
    assert [(row["method"], row["protocol"]) for row in rows] == [(m, p) for m in METHODS for p in PROTOCOLS]
    for row in rows:
        published = row["protocol"] == "otsuki2024"
        maps = methods.get(row["method"])(net, x, comparison.target)
        assert torch.allclose(comparison.maps[row["method"]], maps[0], atol=1e-7)
        expected = insertion_deletion(
            net,
            x,
            maps if published and row["method"] == "guided-backprop" else maps.sum(1),  # first channel, as published
            scored=3 if published else comparison.target,
            points=5,
            seeds=2,
            protocol="otsuki2024" if published else None,
            normalization=NORMALIZATION,
        )
        for name in ("insertion", "deletion", "score", "spread"):
            assert row[name] == pytest.approx(float(getattr(expected, name)), abs=1e-6), (row, name)
        curve = [p for p in comparison.points() if (p["method"], p["protocol"]) == (row["method"], row["protocol"])]
        assert [p["curve"] for p in curve] == ["insertion"] * (len(curve) // 2) + ["deletion"] * (len(curve) // 2)
        told = torch.tensor([p["probability"] for p in curve if p["curve"] == "deletion"])
        assert torch.allclose(told.double(), expected.curves.deletion.probability[0], atol=1e-6)
    assert any(row["spread"] > 0 for row in rows if row["method"] == "paper+hq")
    assert len({row["score"] for row in rows}) == len(rows)


def test_without_a_true_class_both_protocols_score_the_explained_one(net: nn.Module, x: Tensor) -> None:
    found = compare(net, x, ["random", "random"], 2, points=3, normalization=NORMALIZATION)
    assert found.methods == ("random",)
    assert (found.target, found.true) == (2, None)
    assert [row["scored"] for row in found.rows()] == [2, 2]


def test_progress_rises_to_one_and_methods_get_the_scorer(net: nn.Module, x: Tensor) -> None:
    told: list[tuple[float, str]] = []

    def run(_: nn.Module, x: Tensor, __: Tensor, *, scorer: Any = None, progress: Any = None) -> Tensor:
        for done in range(1, 5):
            progress(done, 4)
        return scorer(x).sum() * x[:, :1]

    compare(
        net,
        x,
        [own(run), "random"],
        points=3,
        normalization=NORMALIZATION,
        progress=lambda *said: told.append(said),
    )
    parts = [part for part, _ in told]
    assert parts == sorted(parts)
    assert (parts[0], told[-1]) == (0, (1, "done"))
    assert list(dict.fromkeys(doing for _, doing in told)) == [
        "getting ready",
        "explaining by own",
        "scoring own, published",
        "scoring own, tie-safe",
        "explaining by random",
        "scoring random, published",
        "scoring random, tie-safe",
        "done",
    ]
    assert len({part for part, doing in told if doing == "explaining by own"}) == 5


def test_who_raises_in_progress_ends_the_comparison(net: nn.Module, x: Tensor) -> None:
    def stop(part: float, _: str) -> None:
        if part > 0:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        compare(net, x, ["random", "centre"], points=3, normalization=NORMALIZATION, progress=stop)


def test_a_method_that_fails_is_named_and_the_others_are_done(x: Tensor, photo: Image.Image) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)).eval()
    found = compare(flat, x, ["grad-cam", "paper", "random"], points=3, normalization=NORMALIZATION)
    assert found.methods == ("paper", "random")
    assert list(found.failures) == ["grad-cam"]
    assert found.failures["grad-cam"].endswith(".")
    assert len(list(found.rows())) == 4
    none = compare(flat, x, ["grad-cam"], points=3, normalization=NORMALIZATION)
    assert (none.methods, list(none.failures)) == ((), ["grad-cam"])
    assert cells(grid(none, photo), 1)[0].std() > 10
    assert curves(none).std() > 5


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"methods": ["grad-kam"]}, "no method 'grad-kam'; the nearest are grad-cam"),
        ({"methods": "paper"}, "pass a list"),
        ({"methods": []}, "at least one name"),
        ({"target": 5}, "target 5 is out of range"),
        ({"true": -1}, "target -1 is out of range"),
        ({"points": 1}, "points is 1; pass a number of at least 2"),
        ({"points": "adaptive"}, "points is 'adaptive'"),
        ({"seeds": 0}, "seeds is 0"),
        ({"normalization": None}, "normalised"),
        ({"x": torch.zeros(2, 3, 32, 32)}, "of one image"),
        ({"x": torch.zeros(1, 3, 16, 16)}, "256 pixels, where the published protocol moves 500"),
        ({"x": torch.full((1, 3, 32, 32), float("nan"))}, "NaN"),
        ({"model": Net().train()}, "training mode"),
    ],
)
def test_bad_requests_are_refused_before_any_method_runs(
    bad: dict[str, Any], words: str, net: nn.Module, x: Tensor
) -> None:
    def run(*_: Any) -> Tensor:
        pytest.fail("A method was run.")

    asked = {"model": net, "x": x, "methods": [], "normalization": NORMALIZATION, **bad}
    if isinstance(asked["methods"], list) and "methods" not in bad:
        asked["methods"] = [own(run)]
    elif asked["methods"] == ["grad-kam"]:
        asked["methods"] = [own(run), "grad-kam"]
    with pytest.raises(RelpropError, match=words):
        compare(**asked)


# -- what is painted --


def cells(sheet: np.ndarray, count: int) -> list[np.ndarray]:
    """The pictures on a grid: rows and columns of them, in a field of white and text."""
    rows, columns = layout(count)
    high, wide = (sheet.shape[0] - 14) // rows, (sheet.shape[1] - 14) // columns
    assert sheet.shape == (rows * high + 14, columns * wide + 14, 3)
    return [
        sheet[row * high + 34 :, column * wide + 14 :][:SIDE, :SIDE]
        for row, column in (divmod(place, columns) for place in range(count))
    ]


def test_pictures_are_laid_out_evenly() -> None:
    assert [layout(n) for n in (2, 4, 5, 6, 8, 9, 13)] == [(1, 2), (1, 4), (2, 3), (2, 3), (2, 4), (3, 3), (4, 4)]


def test_the_grid_shows_the_photo_and_every_map(comparison: Comparison, photo: Image.Image) -> None:
    sheet = grid(comparison, photo, "a cat", "a dog")
    large = photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    first, *others = cells(sheet, 5)
    assert (first == np.asarray(large)).all()
    for method, cell in zip(comparison.methods, others, strict=True):
        heatmap = comparison.heatmap(method)
        assert heatmap.shape == (32, 32)
        assert (cell == glow(heatmap, large, limit(heatmap))).all(), method
    for i, one in enumerate(others):
        assert all((one != other).mean() > 0.1 for other in others[i + 1 :])
    assert sheet.shape == (2 * (34 + SIDE + 62) + 14, 3 * (SIDE + 14) + 14, 3)
    assert (sheet[34 + SIDE :][:62, :-14] < 128).sum() > 1000  # the scores below
    assert (sheet != grid(comparison, photo, "a cow", "a dog")).any()


def test_names_that_are_no_formulas_and_too_long_are_painted(net: nn.Module, x: Tensor, photo: Image.Image) -> None:
    strange = own(lambda _, x, __: x[:, :1], "$\\frac$ " + "a" * 99)
    found = compare(net, x, [strange], points=3, normalization=NORMALIZATION)
    sheet = grid(found, photo, "$_{猫" * 30)
    assert sheet.shape == (34 + SIDE + 62 + 14, 2 * (SIDE + 14) + 14, 3)
    assert all((edge == 255).all() for edge in (sheet[:, :12], sheet[:, -12:]))  # nothing is cut off
    assert curves(found).std() > 5


def test_every_method_has_a_line_of_its_own(net: nn.Module, x: Tensor, comparison: Comparison) -> None:
    sheet = curves(comparison)
    assert sheet.shape[1:] == (1600, 3)

    def seen(colour: str) -> int:
        return int((sheet == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum())

    assert all(seen(colour) > 200 for colour in ("#0072B2", "#D55E00", "#009E73", "#CC79A7"))
    assert seen("#56B4E9") == 0  # would be the sixth
    other = curves(compare(net, x, METHODS, target=1, points=5, seeds=2, normalization=NORMALIZATION))
    assert other.shape == sheet.shape
    assert (other != sheet).any()
    many = [own(lambda _, x, __, n=n: x[:, :1] * n, f"own {n}") for n in range(1, 16)]
    assert curves(compare(net, x, many, points=3, normalization=NORMALIZATION)).shape[0] > sheet.shape[0]


# -- the verb --


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Said]]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def call(*arguments: object) -> Said:
        torch.set_num_threads(1)
        with pytest.raises(SystemExit) as exited:
            main(["compare", *map(str, arguments)])
        return Said(int(exited.value.code or 0), *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


def test_the_verb_writes_pictures_numbers_and_a_manifest(run: Callable[..., Said], tmp_path: Path) -> None:
    said = run(*SMALL, "--methods", "paper, random+hq", "--target", "tabby", "--true", 7, "--seeds", 2)
    assert said.code == 0, said.err
    folder = tmp_path / "compare/chelsea"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    model = load("resnet18", "random")
    x = model.prepare(images.PHOTO)[None]
    with (folder / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    maps = np.load(folder / "maps.npz")
    assert sorted(maps) == ["paper", "random+hq"]
    assert maps["paper"].shape == (3, 224, 224)
    for row in rows:
        attributions = torch.from_numpy(maps[row["method"]])[None].sum(1)
        how: dict[str, Any] = {"protocol": "otsuki2024", "scored": 7}
        how = {"seeds": 2, "scored": 281} if row["protocol"] == "tie-safe" else how
        expected = insertion_deletion(model, x, attributions, points=3, **how)
        assert int(row["scored"]) == how["scored"]
        for name in ("insertion", "deletion", "score", "spread"):
            assert float(row[name]) == pytest.approx(float(getattr(expected, name)), abs=1e-6)
        assert f"{round(float(expected.score), 3) + 0.0:.3f}" in said.out
    assert [(row["method"], row["protocol"]) for row in rows] == [
        (method, protocol) for method in ("paper", "random+hq") for protocol in PROTOCOLS
    ]
    assert "scored by the tie-safe protocol: tabby (281" in said.out
    assert "scored by the published one: cock (7)" in said.out
    assert said.out.splitlines()[-1].startswith("In compare/chelsea: grid.png, curves.png")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {*manifest["files"], "manifest.json"} == set(FILES)
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert manifest["image"]["sha256"] == hashlib.sha256(images.PHOTO.read_bytes()).hexdigest()
    assert manifest["weights"]["weights"] == "random"
    assert manifest["settings"] == {"points": 3, "seeds": 2, "baseline": "black"}
    assert manifest["target"]["name"] == "tabby"
    assert manifest["packages"]["torch"].partition("+")[0] == str(torch.__version__).partition("+")[0]
    with Image.open(folder / "grid.png") as sheet:
        assert sheet.size == (3 * (SIDE + 14) + 14, 34 + SIDE + 62 + 14)
    (folder / "notes.txt").write_text("mine")
    again = run(*SMALL, "--methods", "random")
    assert again.code == 0
    assert "scored under both protocols" in again.out
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(np.load(folder / "maps.npz")) == ["random"]


def test_a_missing_package_is_named_and_the_rest_is_done(
    run: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "captum.attr", None)  # what Python itself takes for not installed
    said = run(*SMALL, "--methods", "guided-backprop,random", "--out", "here")
    assert said.code == 1
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: guided-backprop: This needs captum; install it")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == sorted(FILES)
    assert list(json.loads((tmp_path / "here/manifest.json").read_text())["failures"]) == ["guided-backprop"]
    said = run(*SMALL, "--methods", "guided-backprop", "--out", "there")
    assert said.code == 2
    assert "nothing was written" in said.err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (["nothing.jpg"], "There is no image nothing.jpg."),
        (["."], ". is a folder and no image."),
        (["--methods", "random,grad-kam"], "There is no method 'grad-kam'; the nearest are grad-cam"),
        (["--target", "banananana"], "There is no class 'banananana'; the nearest are banana"),
        (["--true", "1000"], "There is no class 1000"),
        (["--points", "1"], "Invalid value for '--points'"),
        (["--model", "resnet19"], "There is no model 'resnet19'"),
        (["--out", "file"], "The results cannot go to file: it is a file."),
        (["--out", "file/below"], "The results cannot go to file/below: Not a directory."),
    ],
)
def test_bad_requests_get_one_sentence(bad: list[str], sentence: str, run: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = run(*SMALL, "--methods", "random", *bad)
    assert (said.code, said.out) == (2, "")
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {sentence}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_help_has_examples(run: Callable[..., Said]) -> None:
    said = run("--help")
    assert said.code == 0
    assert said.out.count("  relprop compare") >= 2
