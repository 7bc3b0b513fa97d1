"""The command line: what it writes, and what it says to everything that can go wrong."""

import hashlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import real
import torch
from PIL import Image
from safetensors.torch import save_file

import relprop
from relprop import cli, images, merges, presets
from relprop.figure import FILES, shares

COMMAND = Path(sys.executable).with_name("relprop")
SMALL = ("--model", "resnet18", "--weights", "random")


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """`run("explain", ...)`: the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    threads = torch.get_num_threads()

    def call(*arguments: object) -> Said:
        torch.set_num_threads(1)
        with pytest.raises(SystemExit) as exited:
            cli.main([str(argument) for argument in arguments])
        return Said(int(exited.value.code or 0), *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


def shell(*arguments: object, **options: Any) -> Said:
    """The installed command, in a process of its own."""
    return process([COMMAND, *map(str, arguments)], **options)


def process(command: Any, **options: Any) -> Said:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment, **options)
    return Said(done.returncode, done.stdout, done.stderr)


def leftovers(folder: Path) -> list[str]:
    """Everything in a folder that a user did not ask for."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.startswith("."))


@pytest.fixture(scope="session")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos") / "photo.jpg"
    path.write_bytes(images.PHOTO.read_bytes())
    return path


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=float)


# -- what is written --


def check_folder(folder: Path, *, quantized: bool = True) -> None:
    """Every picture is there, of its size and not blank, and the manifest vouches for every file."""
    expected = [name for name in FILES if quantized or "quantized" not in name]
    assert sorted(path.name for path in folder.glob("*.png")) == sorted(expected)
    pictures = {name: pixels(folder / name) for name in expected}
    assert {pictures[name].shape for name in expected[2:]} == {(224, 224, 3)}
    assert pictures["panel.png"].shape == (502, (462 * 3 if quantized else 462 * 2) + 14, 3)
    assert pictures["figure.png"].shape[0] == 502
    for name, picture in pictures.items():
        assert picture.std() > 10, name
        assert len(np.unique(picture)) > 5, name
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {*files, "manifest.json"} == {path.name for path in folder.iterdir()}
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == files[name] for name in files)


def test_the_bundled_photo_is_explained_with_real_weights(run: Run, tmp_path: Path) -> None:
    model = real.load("resnet50")
    said = run("explain")
    assert said.code == 0, said.err
    assert str(model.source) in said.err
    lines = said.out.splitlines()
    assert "Egyptian cat" in lines[1]  # the first of five
    assert lines[1].split()[2] == "285"
    assert "tabby" in "".join(lines[2:6])
    assert lines[-1].startswith("1 image explained, conservation error at most ")
    assert "Egyptian cat" in lines[-1]
    assert lines[-1].endswith("the picture is out/chelsea/figure.png.")
    check_folder(tmp_path / "out/chelsea")
    explanation = relprop.Explanation.load(tmp_path / "out/chelsea")
    assert explanation.target.tolist() == [285]
    assert float(explanation.ledger.error) < 1e-5
    assert explanation.settings["weights"]["sha256"] == model.source.sha256
    x = model.prepare(images.PHOTO)[None]
    assert torch.allclose(explanation.relevance, relprop.explain(model, x).relevance, atol=1e-7)
    parted = shares(explanation.ledger, relprop.plan(model).graph)
    assert [share.block for share in parted] == list(range(1, 17))
    assert all(0.05 < share.skip < 0.95 for share in parted)
    assert sum(share.identity for share in parted) == 12  # the first block of each of the four stages projects


def test_a_batch_gives_what_each_image_gives_alone(run: Run, photo: Path, tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    for i, name in enumerate(names):
        images.read(photo).rotate(90 * i, expand=True).save(tmp_path / f"{name}.png")
    together = run("explain", "a.png", "b.png", "c.png", *SMALL, "--batch-size", 2, "--out", "together", "--json")
    rows = json.loads(together.out)["images"]
    assert [row["image"] for row in rows] == ["a.png", "b.png", "c.png"]
    for name, row in zip(names, rows, strict=True):
        assert run("explain", f"{name}.png", *SMALL, "--out", "alone").code == 0
        mine, other = (relprop.Explanation.load(tmp_path / folder / name) for folder in ("together", "alone"))
        assert torch.allclose(mine.relevance, other.relevance, rtol=1e-3, atol=1e-9)
        assert row["conservation_error"] == pytest.approx(float(mine.ledger.error))
        assert torch.allclose(mine.ledger.entry([0]).received, other.ledger.entry([0]).received, rtol=1e-4)


def test_json_is_all_that_stdout_gets(run: Run, photo: Path) -> None:
    said = run("explain", photo, "missing.jpg", *SMALL, "--target", "n02123045", "--json")
    assert said.code == 1
    result = json.loads(said.out)
    (row,) = result["images"]
    assert row["target"] | {"probability": 0} == {
        "class": 281,
        "name": "tabby",
        "synset": "n02123045",
        "probability": 0,
    }
    assert len(row["top"]) == 5
    assert row["conservation_error"] < 1e-5
    assert all(Path(file).is_file() for file in row["files"])
    assert result["weights"]["weights"] == "random"
    assert result["failures"] == [{"image": "missing.jpg", "error": "There is no image missing.jpg."}]
    assert said.errors == ["error: There is no image missing.jpg."]


def test_options_reach_the_engine(run: Run, photo: Path, tmp_path: Path) -> None:
    options = ("--preset", "mixture", "--split", "symmetric", "--no-identity-skips", "--start", "logit", "--target", 7)
    assert run("explain", photo, *SMALL, *options, "--edges", "released", "--levels", 4, "--strict").code == 0
    settings = relprop.Explanation.load(tmp_path / "out/photo").settings
    assert (settings["preset"], settings["split"], settings["identity_skips"]) == ("mixture", "symmetric", False)
    assert (settings["start"], settings["class"]["class"]) == ("logit", 7)
    assert settings["quantization"] == {"edges": "released", "levels": 4}
    assert 2 <= len(np.unique(pixels(tmp_path / "out/photo/quantized.png").reshape(-1, 3), axis=0)) <= 4
    # Again, without quantising: the earlier pictures of it go, and a file of the user's stays.
    (tmp_path / "out/photo/notes.txt").write_text("mine")
    assert run("explain", photo, *SMALL, "--no-quantize").code == 0
    assert (tmp_path / "out/photo/notes.txt").read_text() == "mine"
    (tmp_path / "out/photo/notes.txt").unlink()
    check_folder(tmp_path / "out/photo", quantized=False)


def test_a_model_without_residual_blocks_has_a_figure_too(run: Run, photo: Path, tmp_path: Path) -> None:
    said = run("explain", photo, "--model", "alexnet", "--weights", "random", "--preset", "epsilon")
    assert said.code == 0, said.err
    check_folder(tmp_path / "out/photo")
    assert pixels(tmp_path / "out/photo/figure.png").shape[1] < 1000


def test_own_checkpoints_and_class_names(run: Run, photo: Path, tmp_path: Path) -> None:
    models = relprop.compat.import_torchvision().models
    save_file(models.resnet18(num_classes=3).state_dict(), tmp_path / "mine.safetensors")
    (tmp_path / "mine.txt").write_text("a $\\frac$ dollar\nKätzchen\n猫\n")
    mine = ("--model", "resnet18", "--weights", "mine.safetensors", "--classes", "mine.txt")
    said = run("explain", photo, *mine, "--target", "kätzchen", "--batch-size", 1)
    assert said.code == 0, said.err
    assert len([line for line in said.out.splitlines() if "%  " in line]) == 3
    assert run("explain", photo, *mine, "--target", 0).code == 0
    assert run("explain", photo, *mine, "--target", 2).code == 0
    check_folder(tmp_path / "out/photo")


def test_a_second_run_does_not_explain_the_results_of_the_first(run: Run, tmp_path: Path) -> None:
    for name in ("x/cat.png", "y/cat.png"):
        (tmp_path / name).parent.mkdir()
        Image.effect_noise((50, 50), 90).save(tmp_path / name)
    for _ in range(2):
        said = run("explain", ".", *SMALL)
        assert said.out.splitlines()[-1].startswith("2 images explained")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x-cat", "y-cat"]


# -- the other commands --


def test_the_names_in_the_help_are_those_of_the_engine() -> None:
    assert get_args(cli.Preset) == tuple(presets.PRESETS)
    assert set(get_args(cli.Split)) == set(merges.NAMES)


@pytest.mark.parametrize("command", ["explain", "plan", "check", "models"])
def test_every_command_has_help_with_examples(command: str, run: Run) -> None:
    said = run(command, "--help")
    assert said.code == 0
    assert said.out.count(f"  relprop {command}") >= 2


def test_plan_prints_the_table(run: Run) -> None:
    said = run("plan", "--model", "resnet18", "--preset", "mixture", "--split", "symmetric")
    assert said.code == 0
    assert len(said.out.splitlines()) > 60
    assert "layer4.1.add" in said.out
    assert "symmetric" in said.out
    assert "random" in said.err
    result = json.loads(run("plan", "--model", "resnet18", "--no-identity-skips", "--json").out)
    merge = next(node for node in result["nodes"] if node["node"] == "layer4.1.add")
    assert (merge["treatment"], merge["merge"]) == ("ratio, identity skips out", 8)


def test_models_lists_names_and_weights(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path))
    (tmp_path / f"resnet50-keras-{'0' * 16}.safetensors").touch()
    said = run("models")
    assert "imagenet1k_v1, imagenet1k_v2, keras (cached)" in said.out
    assert "\nefficientnet_lite0 tensorflow\n" in said.out
    rows = json.loads(run("models", "--json").out)["models"]
    assert [row["model"] for row in rows] == relprop.zoo.names()
    assert {row["model"]: row["cached"] for row in rows if row["cached"]} == {"resnet50": ["keras"]}


def test_a_model_that_has_to_know_shapes_is_explained(run: Run, photo: Path, tmp_path: Path) -> None:
    said = run("explain", photo, "--model", "efficientnet_lite0", "--weights", "random", "--strict")
    assert said.code == 0, said.err
    check_folder(tmp_path / "out/photo")


def test_check_passes_what_adds_up_and_names_what_does_not(run: Run, photo: Path) -> None:
    said = run("check", photo, *SMALL)
    assert said.code == 0
    assert said.out.startswith("ok ")
    assert said.out.endswith("1 of 1 image pass, at a tolerance of 1e-05.\n")
    leaking = run("check", photo, *SMALL, "--tolerance", 0, "--json")
    assert leaking.code == 1
    row = json.loads(leaking.out)["images"][0]
    assert not row["adds_up"]
    assert 0 < row["largest_leak"] < 1e-5
    assert row["leaks_most"] in {node["node"] for node in json.loads(run("plan", *SMALL, "--json").out)["nodes"]}
    absorbing = run("check", photo, *SMALL, "--preset", "epsilon", "--max-absorbed", 1e-6)
    assert absorbing.code == 1
    assert absorbing.out.startswith("ABSORBS ")
    assert "most as bias at fc" in absorbing.out
    assert run("check", photo, *SMALL, "--preset", "epsilon").code == 0


# -- bad images --


def bad_images(folder: Path) -> dict[str, str]:
    """Files that cannot be read, and what is said of each."""
    good = images.PHOTO.read_bytes()
    contents: dict[str, tuple[bytes, str]] = {
        "empty.png": (b"", "is empty"),
        "text.jpg": (b"no image", "no image of a kind"),
        "html.png": (b"<html></html>", "no image of a kind"),
        "zeros.gif": (bytes(999), "no image of a kind"),
        "cut.jpg": (good[:9000], "damaged or cut short"),
        "head.jpg": (good[:40], "no image of a kind|damaged or cut short"),
        "gif-head.gif": (b"GIF89a\x10\x00\x10\x00", "no image of a kind|damaged or cut short"),
        "bmp-head.bmp": (b"BM" + bytes(20), "no image of a kind|damaged or cut short"),
        "webp-head.webp": (b"RIFF\x00\x00\x00\x00WEBP", "no image of a kind|damaged or cut short"),
        "[bold]markup.png": (b"", "is empty"),
        "new\nline.png": (b"", "is empty"),
        "ünïcode 猫.png": (b"", "is empty"),
    }
    expected = {}
    for name, (content, sentence) in contents.items():
        (folder / name).write_bytes(content)
        expected[name] = sentence
    Image.new("F", (4, 4)).save(folder / "float.tif")
    Image.new("I", (4, 4), 1 << 20).save(folder / "deep.tif")
    (folder / "dangling.png").symlink_to("nowhere")
    os.mkfifo(folder / "fifo.png")
    (folder / os.fsdecode(b"latin-\xe9.png")).touch()
    buffer = folder / "whole.png"
    Image.effect_noise((90, 90), 50).save(buffer)
    (folder / "cut.png").write_bytes(buffer.read_bytes()[:600])
    damaged = bytearray(buffer.read_bytes())
    damaged[400:600] = bytes(200)
    (folder / "damaged.png").write_bytes(damaged)
    buffer.unlink()
    return expected | {
        "float.tif": "floating-point pixels",
        "deep.tif": "32-bit pixels",
        "dangling.png": "is a link to nothing",
        "fifo.png": "is no regular file",
        os.fsdecode(b"latin-\xe9.png"): "is empty",
        "cut.png": "damaged or cut short",
        "damaged.png": "damaged or cut short",
    }


def test_bad_images_are_listed_and_the_good_ones_are_done(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mix"
    folder.mkdir()
    expected = bad_images(folder)
    (folder / "notes.txt").write_text("not even looked at")
    for mode, name in [
        ("RGB", "a.png"),
        ("CMYK", "b.tif"),
        ("P", "c.gif"),
        ("RGBA", "d.webp"),
        ("L", "e.jpg"),
        ("1", "f.png"),
    ]:
        Image.effect_noise((60, 40), 90).convert("RGB").convert(mode).save(folder / name)
    said = run("explain", "mix", *SMALL, "--json")
    assert said.code == 1
    result = json.loads(said.out)
    assert [Path(row["image"]).name[0] for row in result["images"]] == list("abcdef")
    failures = {Path(failure["image"]).name: failure["error"] for failure in result["failures"]}
    assert failures.keys() == expected.keys()
    assert len(failures) == 19
    for name, sentence in expected.items():
        assert any(part in failures[name] for part in sentence.split("|")), name
        assert name in failures[name]
    assert len(said.errors) == len(failures)
    assert "Traceback" not in said.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list("abcdef")
    assert run("check", "mix", *SMALL).code == 1


def test_without_a_single_good_image_nothing_is_loaded_or_left(run: Run, tmp_path: Path) -> None:
    bad_images(tmp_path)
    said = run("explain", "cut.png", "missing.png", "--weights", "keras", "--out", "new/deep")
    assert said.code == 1
    assert len(said.err.splitlines()) == 2  # and nothing about weights
    assert not (tmp_path / "new").exists()
    assert said.out == ""


# -- bad requests --

BAD: dict[str, tuple[str, str]] = {
    "unknown command": ("explan", "No such command 'explan'. Did you mean 'explain'"),
    "unknown option": ("explain --presett paper", "No such option: --presett"),
    "option of nobody": ("--frobnicate", "No such option"),
    "option without a value": ("explain --out", "requires an argument"),
    "argument too many": ("plan photo.jpg", "unexpected extra argument"),
    "preset": ("explain PHOTO --preset zplus", "'zplus' is not one of 'relprop', 'paper'"),
    "preset of plan": ("plan --preset nil", "'nil' is not one of"),
    "split": ("explain PHOTO --split halves", "'halves' is not one of 'symmetric'"),
    "start": ("check PHOTO --start two", "'two' is not one of 'probability'"),
    "edges": ("explain PHOTO --edges none", "'none' is not one of 'paper'"),
    "one level": ("explain PHOTO --levels 1", "--levels"),
    "no number of levels": ("explain PHOTO --levels many", "--levels"),
    "empty batch": ("explain PHOTO --batch-size 0", "--batch-size"),
    "fraction of a batch": ("explain PHOTO --batch-size 1.5", "--batch-size"),
    "negative tolerance": ("check PHOTO --tolerance -1", "--tolerance"),
    "tolerance in words": ("check PHOTO --tolerance small", "--tolerance"),
    "negative absorption": ("check PHOTO --max-absorbed -0.1", "--max-absorbed"),
    "class too high": ("explain PHOTO SMALL --target 1000", "There is no class 1000; resnet18 has 1000, 0 to 999."),
    "negative class": ("explain PHOTO SMALL --target=-1", "There is no class -1"),
    "class by a wrong name": ("explain PHOTO SMALL --target taby", "There is no class 'taby'; the nearest are tabby"),
    "class by an ambiguous name": ("explain PHOTO SMALL --target terrier", "may be any of "),
    "unknown synset": ("explain PHOTO SMALL --target n99999999", "There is no class 'n99999999'"),
    "empty class": ("explain PHOTO SMALL --target=", "There is no class ''"),
    "model": (
        "explain PHOTO --model resnet51 --weights random",
        "There is no model 'resnet51'; the nearest are resnet5",
    ),
    "model of plan": ("plan --model resnet", "There is no model 'resnet'"),
    "model of check": ("check PHOTO --model ResNeXt", "There is no model 'ResNeXt'"),
    "model of torchvision": ("plan --model torchvision:nothing", "There is no model 'torchvision:nothing'"),
    "model of timm": ("plan --model timm:nothing", "There is no model 'timm:nothing'"),
    "model of nobody": ("plan --model keras:resnet50", "There are no models keras:NAME"),
    "empty model": ("plan --model=", "There is no model ''"),
    "weights": ("explain PHOTO --weights imagenet2k", "There are no weights 'imagenet2k' for resnet50"),
    "weights of another model": (
        "explain PHOTO --model resnet18 --weights keras",
        "There are no weights 'keras' for resnet18",
    ),
    "weights that are missing": ("explain PHOTO --weights missing.pth", "There is no weights file missing.pth"),
    "weights that are a folder": ("explain PHOTO --weights folder", "folder cannot be read: Is a directory"),
    "empty weights": ("explain PHOTO --weights empty.pth", "empty.pth is empty"),
    "text as weights": ("explain PHOTO --weights text.pth", "text.pth is no weights file"),
    "text as safetensors": (
        "explain PHOTO --weights text.safetensors",
        "text.safetensors is cut short or no safetensors",
    ),
    "cut safetensors": ("explain PHOTO --model resnet18 --weights cut.safetensors", "cut.safetensors is cut short"),
    "cut torch file": ("explain PHOTO --model resnet18 --weights cut.pth", "cut.pth is cut short or damaged"),
    "weights that would run code": (
        "explain PHOTO --weights code.pth",
        "code.pth is refused, for it holds",
    ),
    "weights of another network": ("explain PHOTO --model resnet34 --weights whole.pth", "does not fit resnet34: "),
    "weights without tensors": ("explain PHOTO --weights list.pth", "holds no tensors by name"),
    "missing class names": (
        "explain PHOTO SMALL --classes missing.txt",
        "The class names in missing.txt cannot be read",
    ),
    "too few class names": (
        "explain PHOTO --model resnet18 --weights whole.pth --classes text.pth",
        "There are 1 class names for the 4 outputs",
    ),
    "empty class names": ("explain PHOTO SMALL --classes empty.pth", "line 1 is empty"),
    "binary class names": ("explain PHOTO SMALL --classes whole.pth", "cannot be read"),
    "class names that are a folder": ("explain PHOTO SMALL --classes folder", "cannot be read: Is a directory"),
    "no such image": ("explain missing.jpg", "There is no image missing.jpg"),
    "image behind a file": ("explain text.pth/x.jpg", "text.pth/x.jpg cannot be read: Not a directory"),
    "weights as an image": ("explain whole.pth", "whole.pth is no image of a kind that can be read"),
    "device as an image": ("explain /dev/null", "/dev/null is no regular file"),
    "image with too long a name": (f"explain {'x' * 300}.jpg", "File name too long"),
    "empty folder": ("explain folder", "There are no images in folder"),
    "empty folder to check": ("check folder", "There are no images in folder"),
    "empty name": ("explain EMPTY", "has an empty name"),
    "output that is a file": ("explain PHOTO SMALL --out text.pth", "cannot go to text.pth: it is a file"),
    "output behind a file": ("explain PHOTO SMALL --out text.pth/deep", "cannot go to text.pth/deep: "),
    "output where nothing can be": ("explain PHOTO SMALL --out /proc/relprop/out", "cannot go to /proc/relprop/out: "),
    "output with too long a name": (f"explain PHOTO SMALL --out {'x' * 300}", "File name too long"),
    "output of an image that is a file": ("explain PHOTO SMALL --out taken", "taken/photo is a file"),
}
SOME_IMAGE = {"no such image", "image behind a file", "weights as an image", "device as an image"}
SOME_IMAGE |= {"image with too long a name", "output of an image that is a file"}


@pytest.fixture(scope="session")
def clutter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are not what a request takes them for."""
    folder = tmp_path_factory.mktemp("clutter")
    state = relprop.compat.import_torchvision().models.resnet18(num_classes=4).state_dict()
    torch.save(state, folder / "whole.pth")
    save_file(state, folder / "whole.safetensors")
    for kind in ("pth", "safetensors"):
        data = (folder / f"whole.{kind}").read_bytes()
        (folder / f"cut.{kind}").write_bytes(data[: len(data) // 2])
        (folder / f"text.{kind}").write_text("cat\n")
    (folder / "empty.pth").touch()
    torch.save([1, 2, 3], folder / "list.pth")
    (folder / "code.pth").write_bytes(pickle.dumps({"weight": Runs()}))
    (folder / "folder").mkdir()
    (folder / "taken").mkdir()
    (folder / "taken/photo").touch()
    return folder


class Runs:
    """Unpickling this would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def contents(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_gets_one_sentence(
    kind: str, run: Run, clutter: Path, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, expected = BAD[kind]
    monkeypatch.chdir(clutter)
    before = contents(clutter)
    words = {"PHOTO": [photo], "SMALL": [*SMALL], "EMPTY": [""]}
    said = run(*(argument for word in request.split() for argument in words.get(word, [word])))
    assert said.code == (1 if kind in SOME_IMAGE else 2)
    assert said.out == ""
    assert len(said.errors) == 1
    assert any(part in said.errors[0] for part in expected.split("|")), said.err
    assert said.errors[0].endswith(".")
    assert "Traceback" not in said.err
    assert contents(clutter) == before


def test_there_are_enough_bad_inputs() -> None:
    assert len(BAD) >= 60


@pytest.mark.usefixtures("offline")
def test_without_a_network_both_sources_are_named(
    run: Run, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / "cache"))
    said = run("explain", photo)
    assert said.code == 2
    assert len(said.errors) == 1
    assert "imagenet1k_v1" in said.errors[0]
    assert "npm package" in said.errors[0]
    assert contents(tmp_path / "cache") == [str(tmp_path / "cache/.lock")]
    assert not (tmp_path / "out").exists()
    said = run("explain", photo, "--model", "efficientnet_lite0")
    assert said.code == 2
    assert len(said.errors) == 1
    assert "nor as tensorflow (The pip package" in said.errors[0]


@pytest.mark.usefixtures("offline")
def test_cut_weights_in_the_cache_are_left_out(
    run: Run, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path))
    damaged = tmp_path / f"resnet50-keras-{'0' * 16}.safetensors"
    damaged.write_bytes(b"cut")
    said = run("explain", photo)
    assert said.code == 2
    assert f"{damaged} is damaged and is left out." in said.err
    assert not damaged.exists()


def test_what_nobody_expected_is_one_sentence_and_a_traceback_on_demand(
    run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug\nwith details")

    monkeypatch.setattr(relprop, "explain", broken, raising=False)
    said = run("explain", photo, *SMALL)
    assert said.code == 2
    assert said.errors == ["error: Something unexpected, ZeroDivisionError: a bug; --debug shows where."]
    assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()
    assert "in broken" in run("explain", photo, *SMALL, "--debug").err


def test_a_leak_fails_its_image_alone_when_strict(
    run: Run, photo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Image.new("RGB", (50, 50), "red").save(tmp_path / "red.png")
    engine = relprop.explain

    def picky(model: Any, x: torch.Tensor, *rest: Any, **options: Any) -> relprop.Explanation:
        if any(image.std((1, 2)).max() < 1e-6 for image in x):
            raise relprop.RelpropError("conv1 leaks.")
        return engine(model, x, *rest, **options)

    monkeypatch.setattr(relprop, "explain", picky)
    said = run("explain", "red.png", photo, *SMALL, "--strict")
    assert said.code == 1
    assert said.errors == ["error: conv1 leaks."]
    check_folder(tmp_path / "out/photo")
    assert not (tmp_path / "out/red").exists()


# -- the installed command --


def test_help_answers_at_once_and_without_torch() -> None:
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        assert shell("--help").code == 0
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 1
    script = "import sys, relprop.cli; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert process([sys.executable, "-c", script]).out == "False False\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        ([], 0),
        (["plan", "--preset", "x"], 2),
        (["explain", "missing.jpg"], 1),
        (["explain", "folder-that-is-not-there/", "--out", "x"], 1),
        (["nothing"], 2),
    ],
)
def test_exit_codes_of_the_installed_command(arguments: list[str], code: int, tmp_path: Path) -> None:
    said = shell(*arguments, cwd=tmp_path)
    assert said.code == code, said.err
    assert len(said.errors) == (code != 0)
    assert not leftovers(tmp_path)


@pytest.fixture
def photos(photo: Path, tmp_path: Path) -> Path:
    """A folder of many photos."""
    (tmp_path / "photos").mkdir()
    for i in range(40):
        (tmp_path / f"photos/{i:02d}.jpg").symlink_to(photo)
    return tmp_path / "photos"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_what_is_done_and_nothing_else(
    number: signal.Signals, code: int, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    # Jobs in the background of a shell ignore an interrupt, and so would their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = subprocess.Popen(
        [COMMAND, "explain", photos, *SMALL, "--batch-size", "1", "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 60
        while not (out / "01").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        started.send_signal(number)
        _, said = started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == code
    assert "Traceback" not in said
    assert ("error: Interrupted" in said) == (number == signal.SIGINT)
    done = sorted(path.name for path in out.iterdir())
    assert 2 <= len(done) < 40
    assert done == [f"{i:02d}" for i in range(len(done))]
    for name in done:
        check_folder(out / name)


def test_files_that_cannot_be_written_whole_are_not_written(run: Run, photo: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        said = run("explain", photo, *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.code == 1
    assert len(said.errors) == 1
    assert f"The results for {photo} cannot be written: " in said.errors[0]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`disk("size=1m")`: a disk of its own."""
    path = tmp_path / "disk"
    path.mkdir()

    def make(options: str) -> Path:
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a disk, and not everywhere")
        return path

    yield make
    subprocess.run(["umount", str(path)], capture_output=True, check=False)


def test_a_full_disk_fails_the_images_that_have_no_room(run: Run, photos: Path, disk: Callable[[str], Path]) -> None:
    out = disk("size=2400k") / "out"
    said = run("explain", *sorted(photos.iterdir())[:3], *SMALL, "--out", out)
    assert said.code == 1
    assert len(said.errors) == 2
    assert all("cannot be written: " in error for error in said.errors)
    assert [path.name for path in out.iterdir()] == ["00"]
    check_folder(out / "00")


def test_a_read_only_disk_is_noticed_before_anything_is_loaded(run: Run, disk: Callable[[str], Path]) -> None:
    out = disk("ro") / "out"
    said = run("explain", "--out", out)
    assert said == (2, "", f"error: The results cannot go to {out}: Read-only file system.\n")


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    # root may write everywhere, unless that right is taken away
    plain = "setpriv --bounding-set=-dac_override " if os.geteuid() == 0 else ""
    said = process(f"{plain}{COMMAND} explain --out closed/new", shell=True, cwd=tmp_path)
    assert (said.code, said.errors) == (2, ["error: The results cannot go to closed/new: Permission denied."])


def test_stdout_may_be_full_closed_or_gone(tmp_path: Path) -> None:
    full = process(f"{COMMAND} explain --help > /dev/full", shell=True, cwd=tmp_path)
    assert full.code != 0
    assert full.errors == ["error: The output cannot be used: No space left on device."]
    closed = process(f"{COMMAND} explain --help >&-", shell=True, cwd=tmp_path)
    gone = process(f"{COMMAND} explain --help | true", shell=True, cwd=tmp_path)
    for said in (full, closed, gone):
        assert "Traceback" not in said.err
        assert "Exception ignored" not in said.err


# -- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_for(name: str) -> None:
    said = shell("--show-completion", name)
    assert said.code == 0, said.err
    assert "_RELPROP_COMPLETE" in said.out


def test_completion_is_installed_where_the_shell_looks(tmp_path: Path) -> None:
    said = shell("--install-completion", "bash", env={"HOME": str(tmp_path)})
    assert said.code == 0, said.err
    scripts = [path for path in tmp_path.rglob("*") if path.is_file() and "_RELPROP_COMPLETE" in path.read_text()]
    assert scripts
    assert str(scripts[0]) in (tmp_path / ".bashrc").read_text()


def test_completion_offers_verbs_options_and_values() -> None:
    def offered(*words: str) -> list[str]:
        how = {"_RELPROP_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return shell(env=how).out.split()

    assert offered("relprop", "do") == ["doctor"]
    assert offered("relprop", "explain", "--pres") == ["--preset"]
    assert offered("relprop", "explain", "--preset", "epsilon-") == ["epsilon-plus-flat", "epsilon-gamma-box"]
