"""Training: the recipe, the parts, kept features, kill-and-continue, damaged downloads, and weights that load again."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from lightning_fabric import Fabric
from PIL import Image
from torch import nn

import relprop
from relprop import RelpropError, datasets, training, weights, zoo
from relprop.cli import main
from relprop.datasets import folder
from relprop.preparation import Preparation
from relprop.study import manifest
from relprop.training import Recipe, Training, checkpoint, network
from relprop.training.features import Features
from relprop.training.feeds import Kept, shuffled
from relprop.training.views import lot, view

HERE = Path(__file__).parent
COLOURS = ("amber", "blue", "green")


def draw(path: Path, colour: int, seed: int) -> None:
    """A noisy patch of a colour, on grey."""
    noise = np.random.default_rng(seed).integers(0, 60, (40, 48, 3))
    noise[8:32, 8:40, colour] += 180
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for colour, name in enumerate(COLOURS):
        for i in range(12):
            draw(root / name / f"{i:02d}.png", colour, 100 * colour + i)
    return root


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """A small set in the layout of CUB-200-2011, half of it for training."""
    root = tmp_path / "CUB_200_2011"
    files = [f"{c + 1:03d}.{name}/{name}_{i}.png" for c, name in enumerate(COLOURS) for i in range(10)]
    for i, file in enumerate(files):
        draw(root / "images" / file, i // 10, i)
    numbered = {
        "images": files,
        "image_class_labels": [str(i // 10 + 1) for i in range(30)],
        "train_test_split": [str(i % 2) for i in range(30)],
    }
    for table, values in numbered.items():
        (root / f"{table}.txt").write_text("".join(f"{i} {value}\n" for i, value in enumerate(values, 1)))
    (root / "classes.txt").write_text("".join(f"{c + 1} {c + 1:03d}.{name}\n" for c, name in enumerate(COLOURS)))
    return root


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return training.devices("cpu")


@pytest.fixture
def run(photos: Path, fabric: Fabric) -> Callable[..., Training]:
    def make(out: Path, part: str = "all", model: zoo.Model | None = None, **recipe: float) -> Training:
        settings = Recipe(**{"lr": 0.05, "batch_size": 8, "epochs": 4, **recipe})
        return Training(
            model or tiny.model(), lambda seed: training.open_folder(photos, seed), out, fabric, settings, part
        )

    return make


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


def small_resnet() -> zoo.Model:
    """The stages of a ResNet, for images that take no time."""
    return replace(zoo.load("resnet18", "random"), preparation=Preparation(resize=36, crop=32))


# -- The recipe --


def test_the_papers_recipe_is_the_default() -> None:
    recipe = Recipe()
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (1e-3, 0.9, 1e-4)
    assert (recipe.batch_size, recipe.epochs, recipe.patience) == (32, 300, 6)
    assert [recipe.lr_at(epoch) for epoch in (0, 29, 30, 59, 60)] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5])


@pytest.mark.parametrize(("name", "value"), [("lr", 0), ("lr", float("nan")), ("batch_size", 1), ("weight_decay", -1)])
def test_a_recipe_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(RelpropError, match=f"The {name.replace('_', ' ')} cannot be {value}"):
        Recipe(**{name: value})


def test_it_stops_after_epochs_without_a_better_validation_loss(run: Callable[..., Training], tmp_path: Path) -> None:
    # At this rate nothing moves, so the first epoch stays the best.
    outcome = run(tmp_path, "head", lr=1e-30, epochs=40, patience=3)()
    assert (outcome.epochs, outcome.best_epoch) == (4, 1)


def test_the_weights_are_those_of_the_best_epoch(run: Callable[..., Training], tmp_path: Path) -> None:
    outcome = run(tmp_path, lr=0.5, epochs=8, patience=8)()
    with (tmp_path / "seed0" / "log.csv").open(newline="") as file:
        log = list(csv.DictReader(file))
    losses = [float(line["validation_loss"]) for line in log]
    assert len(log) == 8
    assert losses.index(min(losses)) + 1 == outcome.best_epoch < 8
    net = tiny.model().module
    net.head = nn.Linear(8, 3)
    net.load_state_dict(dict(weights.read(outcome.weights).tensors))
    model = replace(tiny.model(), module=net.eval())
    parts = training.open_folder(run(tmp_path).parts(0).train.root)
    x = torch.stack([model.prepare(sample.path) for sample in parts.validation])
    y = torch.tensor([sample.label for sample in parts.validation])
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(net(x), y)) == pytest.approx(outcome.validation_loss, rel=1e-3)


def test_a_loss_that_runs_away_is_named(run: Callable[..., Training], tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match="no longer finite in epoch 1; lower the learning rate 1e"):
        run(tmp_path, lr=1e30)()


# -- Parts and views --


def test_birds_are_parted_by_the_seed_and_the_test_set_stays(birds: Path) -> None:
    first, same, other = (training.open_birds(birds, seed) for seed in (0, 0, 1))
    assert [len(part) for _, part in first.items()] == [13, 2, 15]
    assert first == same
    assert first.validation.samples != other.validation.samples
    assert first.test.samples == other.test.samples
    together = {sample.name for _, part in first.items() for sample in part}
    assert len(together) == 30
    assert str(first).endswith("3 classes, 13 for training, 2 for validation, 15 for test")


def test_the_official_numbers() -> None:
    # 200 classes, of which 194 have 30 training images and 6 have 29: 5,994.
    samples = tuple(
        datasets.Sample(Path(f"{c}/{i}.jpg"), c, f"{c}/{i}.jpg") for c in range(200) for i in range(29 + (c < 194))
    )
    train = datasets.Dataset("birds", Path(), "", samples)
    parts = training.parts._parted(train, train.first(), tuple(map(str, range(200))), 0)
    assert (len(parts.train), len(parts.validation)) == (5394, 600)
    assert {sum(s.label == c for s in parts.validation) for c in range(200)} == {3}


def test_a_folder_gives_its_parts_or_they_are_drawn(photos: Path, tmp_path: Path) -> None:
    drawn = training.open_folder(photos)
    assert [len(part) for _, part in drawn.items()] == [25, 3, 8]
    assert drawn.classes == COLOURS
    assert drawn.test == training.open_folder(photos, 1).test
    for part, colours in (("train", COLOURS), ("val", COLOURS)):
        for name in colours:
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(4):
                draw(tmp_path / part / name / f"{i}.png", 0, i)
    assert [len(part) for _, part in training.open_folder(tmp_path).items()] == [10, 2, 12]
    (tmp_path / "val").rename(tmp_path / "test")
    assert [len(part) for _, part in training.open_folder(tmp_path).items()] == [10, 2, 12]
    (tmp_path / "train" / "amber").rename(tmp_path / "train" / "red")
    with pytest.raises(RelpropError, match="have different classes, such as amber"):
        training.open_folder(tmp_path)
    with pytest.raises(RelpropError, match="not a folder with a folder of images for each of two classes"):
        training.open_folder(tmp_path / "test" / "blue")


def test_orders_cover_an_epoch_once_over_all_devices_and_no_step_has_one_image(photos: Path) -> None:
    data = folder.read(photos)
    assert data is not None
    assert shuffled(data, 0, 0, 8) == shuffled(data, 0, 0, 8) != shuffled(data, 0, 1, 8)
    assert {s.name for s in shuffled(data, 0, 0, 8)} == {s.name for s in data}
    assert len(shuffled(data, 0, 0, 7)) == 35  # 36 are five sevens and one
    shares = [shuffled(data, 0, 0, 4, rank, 2) for rank in range(2)]
    assert sorted(s.name for share in shares for s in share) == sorted(s.name for s in data)


def test_views_are_crops_of_what_tests_see_or_their_mirror_images(photos: Path) -> None:
    path, preparation = photos / "blue" / "00.png", Preparation(resize=36, crop=32)
    whole = preparation.normalised(preparation.resized(path))
    seen = [view(path, preparation, lot("crop", i)) for i in range(12)]
    places = whole.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    mirrored = 0
    for crop in seen:
        here = any(torch.equal(crop, place) for place in places)
        turned = any(torch.equal(crop.flip(2), place) for place in places)
        assert here or turned
        mirrored += turned
    assert 0 < mirrored < 12
    assert len({crop.numpy().tobytes() for crop in seen}) > 6


# -- What is trained --


@pytest.mark.parametrize(("part", "moved"), [("head", {"fc"}), ("layer4", {"layer4", "fc"})])
def test_only_the_part_that_was_asked_for_changes(
    part: str, moved: set[str], run: Callable[..., Training], tmp_path: Path
) -> None:
    model = small_resnet()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    outcome = run(tmp_path, part, model, epochs=1)()
    after = weights.read(outcome.weights).tensors
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == moved
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.state_dict().items())


def test_kept_features_give_what_photos_give(photos: Path, tmp_path: Path) -> None:
    model = small_resnet()
    net = network.build(model, COLOURS, "layer4")
    assert net.frozen is not None
    data = folder.read(photos)
    assert data is not None
    kept = Kept(Features.of(data, net.frozen, model.preparation, tmp_path, count=2))
    x, y = next(kept.plain(data.samples, 4))
    inputs = torch.stack([model.prepare(sample.path) for sample in data.samples[:4]])
    with torch.no_grad():
        assert torch.allclose(net.trained(x), net.whole(inputs), rtol=1e-2, atol=1e-2)  # kept in 16 bits
    assert y.tolist() == [sample.label for sample in data.samples[:4]]
    first, again, later = (next(kept.drawn(data.samples, 36, "crop", epoch))[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_features_are_computed_once_and_another_view_alone(photos: Path, tmp_path: Path) -> None:
    net = network.build(tiny.model(), COLOURS, "head")
    data, done = folder.read(photos), list[str]()
    assert data is not None
    assert net.frozen is not None
    for count, said in ((1, {"view 1 of 1"}), (1, set()), (2, {"view 2 of 2"})):
        done.clear()
        Features.of(
            data, net.frozen, tiny.model().preparation, tmp_path, count=count, tick=lambda *about: done.append(about[2])
        )
        assert {text.partition(", ")[2] for text in done} == said


def test_a_network_that_cannot_be_cut_there_is_refused() -> None:
    with pytest.raises(RelpropError, match="tiny cannot be cut at 'block'"):
        network.build(tiny.model(), COLOURS, "block")
    with pytest.raises(RelpropError, match="no stage 'layer9' to train from; there are all, head, block, head"):
        network.build(tiny.model(), COLOURS, "layer9")


def test_the_same_classes_keep_their_head() -> None:
    model = tiny.model()
    names = tuple(map(str, range(10)))
    same = network.build(replace(model, classes=names), names)
    assert torch.equal(same.whole.head.weight, model.module.head.weight)
    other, again, seeded = (network.build(model, names, seed=seed).whole.head.weight for seed in (0, 0, 1))
    assert torch.equal(other, again)
    assert not torch.equal(other, seeded)


# -- Killed and continued --


def test_killed_at_any_moment_it_ends_with_the_same_weights(photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "kill_training.py"), str(photos), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {"all": 7, "head": 6}
    for part in ("all", "head"):
        whole, broken = (tmp_path / part / name / "seed3" for name in ("whole", "broken"))
        assert (whole / "weights.safetensors").read_bytes() == (broken / "weights.safetensors").read_bytes()
        logs = [(f / "log.csv").read_text().splitlines() for f in (whole, broken)]
        assert len(logs[0]) == 7
        assert [line.rpartition(",")[0] for line in logs[0]] == [line.rpartition(",")[0] for line in logs[1]]


def test_more_epochs_continue_and_another_training_is_refused(run: Callable[..., Training], tmp_path: Path) -> None:
    said: list[str] = []
    run(tmp_path / "a", epochs=2)()
    longer = run(tmp_path / "a", epochs=4)
    longer.say = said.append
    outcome, straight = longer(), run(tmp_path / "b", epochs=4)()
    assert said[0] == "seed 0: continues after epoch 2"
    assert outcome.weights.read_bytes() == straight.weights.read_bytes()
    longer()
    assert said[-1] == "seed 0: is there already"
    with pytest.raises(RelpropError, match="has had 4 epochs, and 3 are asked for"):
        run(tmp_path / "a", epochs=3)()
    with pytest.raises(RelpropError, match="holds another training"):
        run(tmp_path / "a", lr=0.01)()


def test_a_damaged_checkpoint_is_named_and_one_that_could_run_code_is_not_read(
    run: Callable[..., Training], tmp_path: Path
) -> None:
    path = tmp_path / "seed0" / "checkpoint.pt"
    path.parent.mkdir()
    path.write_bytes(b"PK nothing")
    with pytest.raises(RelpropError, match="is damaged"):
        run(tmp_path)()
    torch.save({"request": checkpoint.load}, path)  # a function, which only code can restore
    with pytest.raises(RelpropError, match="is damaged"):
        run(tmp_path)()


# -- Damage --


def test_a_whole_set_has_no_damage_but_is_small(birds: Path) -> None:
    found = list(training.birds(birds))
    assert not [finding for finding in found if finding.grave]
    assert [str(f).rpartition("/")[2] for f in found] == [
        "images.txt: lists 30 images; the official set has 11,788",
        "train_test_split.txt: lists 15 training images; the official set has 5,994",
        "train_test_split.txt: lists 15 test images; the official set has 5,794",
        "classes.txt: lists 3 classes; the official set has 200",
        "segmentations: has masks of 0 of 30 images; others are localised by their boxes",
    ]
    assert list(training.birds(birds.parent)) == found


def test_what_is_missing_or_damaged_is_named_by_file(birds: Path) -> None:
    gone, empty, cut = (birds / "images" / "002.blue" / f"blue_{i}.png" for i in range(3))
    gone.unlink()
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:900])
    found = {f.path: f.what for f in training.birds(birds) if f.grave}
    assert found.keys() == {gone, empty, cut}
    assert (found[gone], found[empty]) == ("is missing", "is empty")
    assert found[cut].startswith("is damaged or cut short")
    assert {f.path for f in training.birds(birds, deep=False) if f.grave} == {gone, empty}
    (birds / "classes.txt").write_text("1 001.amber\n")
    assert any("names 1" in f.what and f.grave for f in training.birds(birds))
    (birds / "train_test_split.txt").write_text("".join(f"{i} 0\n" for i in range(1, 31)))
    assert [f.what for f in training.birds(birds)] == ["has no images in the split 'train'; there are test, train, all"]
    (birds / "train_test_split.txt").unlink()
    assert [f.what for f in training.birds(birds)] == ["is missing"]


def test_check_says_so_and_training_does_not_start(birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["train", "cub", "--data", str(birds)]
    assert code(*ask, "--check") == 0
    assert "can be trained with" in capsys.readouterr().out
    for path in (birds / "images" / "001.amber").iterdir():
        path.unlink()
    assert code(*ask, "--check") == 1
    assert capsys.readouterr().out.count("is missing") == 10
    assert code(*ask) == 2
    sentence = capsys.readouterr().err.strip()
    assert "is missing; and 7 more, which --check lists." in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["cub", "--data", "nowhere"], "There is no folder nowhere"),
        (["cub", "--data", str(HERE)], "images.txt: is missing"),
        (["folder", "--data", str(HERE)], "not a folder with a folder of images"),
    ],
)
def test_bad_requests_get_one_sentence(asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code("train", *asked) == 2
    sentence = capsys.readouterr().err.strip()
    assert said in sentence
    assert "\n" not in sentence


def test_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(RelpropError, match="There is no training on 2 nonsense devices at 32-true"):
        training.devices("nonsense", "2")


# -- The whole way --


def test_birds_are_trained_and_the_weights_are_taken(
    birds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    ask = ["train", "cub", "--data", str(birds), "--model", "resnet18", "--weights", "random", "--out", str(out)]
    assert code(*ask, "--train", "head", "--seeds", "2", "--epochs", "2", "--views", "1", "--accelerator", "cpu") == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["seed", "---:", "0", "1", "mean"]
    assert " ± " in table[-1]
    assert table == training.tabulate([training.Outcome.read(out / f"seed{seed}") for seed in (0, 1)]).splitlines()
    with pytest.raises(RelpropError, match="holds no training that was finished"):
        training.Outcome.read(out)
    with Image.open(out / "seed1" / "curve.png") as picture:
        assert picture.width > picture.height > 200
    path = out / "seed1" / "weights.safetensors"
    model = relprop.load("resnet18", path)
    assert model.classes == ("001.amber", "002.blue", "003.green")
    assert model.preparation == zoo.load("resnet18", "random").preparation
    assert model.source.origin == "head trained with relprop on CUB_200_2011, from random"
    facts = manifest.read(out / "seed1")
    assert facts["sha256"] == model.source.sha256
    assert facts["images"] == {"training": 13, "validation": 2, "test": 15}
    test = datasets.open(birds)
    x = torch.stack([model.prepare(sample.path) for sample in test])
    right = model.module(x).argmax(1) == torch.tensor([sample.label for sample in test])
    assert float(right.float().mean()) == pytest.approx(facts["outcome"]["test_accuracy"])
    photo = str(test[0].path)
    assert (
        code("explain", photo, "--model", "resnet18", "--weights", str(path), "--target", "blue", "--out", str(out))
        == 0
    )
    assert "002.blue" in capsys.readouterr().out


def test_the_full_recipe_on_a_few_birds(birds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    ask = ["train", "cub", "--data", str(birds), "--model", "resnet18", "--weights", "random", "--accelerator", "cpu"]
    assert code(*ask, "--epochs", "1", "--out", str(out)) == 0
    facts = manifest.read(out / "seed0")
    assert facts["recipe"] == {
        "lr": 1e-3,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "batch_size": 32,
        "epochs": 1,
        "step": 30,
        "patience": 6,
        "precision": "32-true",
    }
    assert (out / "seed0" / "log.csv").read_text().count("\n") == 2
    said = capsys.readouterr().err
    assert "seed 0, epoch 1: loss" in said
    assert "done, the best was epoch 1" in said


def test_two_devices_train_one_network(tmp_path: Path) -> None:
    for i in range(20):
        draw(tmp_path / "photos" / COLOURS[i % 2] / f"{i}.png", i % 2, i)
    # A script of its own: for each further device, Lightning runs it again.
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom relprop.cli import main\ntorch.set_num_threads(1)\nmain()\n")
    command = [sys.executable, str(script), "train", "folder", "--data", str(tmp_path / "photos")]
    command += ["--model", "resnet18", "--weights", "random"]
    more = ["--accelerator", "cpu", "--devices", "2", "--epochs", "1", "--batch-size", "8", "--out", str(tmp_path)]
    ran = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("| 0 | 1 | 1 |") == 1
    assert (tmp_path / "seed0" / "log.csv").read_text().count("\n") == 2
    assert relprop.load("resnet18", tmp_path / "seed0" / "weights.safetensors").classes == COLOURS[:2]
