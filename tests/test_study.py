"""Studies: rows that survive, resume, agree and merge; tables that say how sure they are."""

import csv
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from rich.console import Console
from torch import Tensor, nn

from relprop import RelpropError, datasets, insertion_deletion, methods, metrics, zoo
from relprop.cli import main
from relprop.datasets import Sample
from relprop.methods import Method
from relprop.metrics.remembering import Remembering
from relprop.study import Journal, Progress, Row, Study, estimate, evaluate, measures, merge, probes, read, tabulate
from relprop.study.local import Local
from relprop.study.measure import Seen
from relprop.study.progress import Mean, spoken
from relprop.study.runner import Runner
from relprop.study.watch import Watch

METHODS = ["paper", "random+hq"]
Relprop = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.photos(tmp_path_factory.mktemp("photos") / "some", 8)


@pytest.fixture(scope="module")
def located(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four photos: two with a box, one without, one whose box the model does not see."""
    root = tiny.photos(tmp_path_factory.mktemp("located") / "some", 4)
    (root / "boxes.csv").write_text("file,x0,y0,x1,y1\n00.png,5,5,20,20\n01.png,10,10,38,30\n03.png,0,0,0,39\n")
    return root


@pytest.fixture(scope="module")
def model() -> zoo.Model:
    return tiny.model()


@pytest.fixture
def relprop(capsys: pytest.CaptureFixture[str]) -> Relprop:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def rows_of(folder: Path) -> list[Row]:
    with Journal(folder / "journal.sqlite") as journal:
        return list(journal)


def agree(mine: list[Row], theirs: list[Row]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert replace(a, values={}, curves={}) == replace(b, values={}, curves={})
        assert dict(a.values) == pytest.approx(dict(b.values), abs=1e-5)


def own(name: str, run: Callable[..., Tensor]) -> Method:
    return Method(name, "control", "none", 0, "a test's", run)


def inputs(model: zoo.Model, folder: Path) -> Tensor:
    return torch.stack([model.prepare(sample.path) for sample in datasets.open(folder)])


# -- Rows --


def test_a_study_measures_every_method_on_every_image_once(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"points": 5, "seeds": 1, "limit": 2, "out": tmp_path}
    study = evaluate(model, photos, METHODS[:1], **settings)
    assert len(study.rows) == 2
    before = (tmp_path / "journal.sqlite").stat().st_mtime_ns
    evaluate(model, photos, METHODS[:1], **settings)
    assert (tmp_path / "journal.sqlite").stat().st_mtime_ns == before  # nothing was left to write
    more = evaluate(model, photos, METHODS[:2], ["insertion-deletion", "sparseness"], **settings)
    assert len(more.rows) == 8
    assert {r.key for r in study.rows} <= {r.key for r in more.rows}
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.num_rows == 8
    assert {"score", "insertion curve", "sparseness"} <= set(table.column_names)


def test_what_a_row_is_known_by_does_not_change(model: zoo.Model, tmp_path: Path) -> None:
    """Old studies are continued by new code: these keys must never change."""
    (tmp_path / "i.png").write_bytes(b"an image")
    sample = Sample(tmp_path / "i.png", 3, "i.png")
    facts: dict[str, Any] = {
        "format": "1",
        "image": hashlib.sha256(b"an image").hexdigest(),
        "label": 3,
        "weights": "w",
        "preparation": "Preparation(resize=36, crop=32, interpolation='bilinear', normalization=Normalization("
        "mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))",
        "precision": "float32",
    }
    settings: dict[str, dict[str, Any]] = {
        "otsuki2024": {"protocol": "otsuki2024", "points": 26},
        "tie-safe": {"points": 26, "seeds": 1, "baseline": "black"},
    }
    pinned = {"otsuki2024": "240105d3094d2ca542e84f7544175e3d", "tie-safe": "00991f8dfd19b39b40576dbf321189d2"}
    wanted = measures.make(["insertion-deletion"], "both", {"points": 26, "seeds": 1})
    overrides = {"overrides": "None", "start": "probability"}
    options = {
        "random+hq": {"seed": "0"},
        "paper": {"split": "None", "identity_skips": "True", **overrides},
        "i": overrides,
    }
    runner = Runner(model, [methods.get(name) for name in options], wanted, 8, "float32")
    runner.weights = "w"
    keys = runner.keys(sample, company=["who else is in the batch does not matter"])
    assert len(keys) == 6
    for (method, measure), found in keys.items():
        metric = ["insertion-deletion", measure.protocol, settings[measure.protocol]]
        text = json.dumps({**facts, "method": [method.name, options[method.name]], "metric": metric}, sort_keys=True)
        assert found == hashlib.sha256(text.encode()).hexdigest()[:32]
        assert method.name != "random+hq" or found == pinned[measure.protocol]
    plain = measures.make(["insertion-deletion"], "both", {})
    assert [dict(m.settings) for m in plain] == [
        {"protocol": "otsuki2024"},
        {"points": 26, "seeds": 3, "baseline": "black"},
    ]


def test_rows_tell_the_score_of_the_other_class_too(model: zoo.Model, photos: Path) -> None:
    study = evaluate(model, photos, ["paper", "saliency"], protocol="both", limit=2, points=5, seeds=1)
    assert any(row.label != row.target for row in study.rows)
    for row in study.rows:
        x = model.prepare(photos / row.image)[None]
        published = row.protocol == "otsuki2024"
        # As published, gradient baselines are ranked by their first channel.
        name = row.method if published and row.method == "saliency" else f"{row.method}+sum"
        maps = methods.get(name)(model, x, row.target)
        how: dict[str, Any] = {"protocol": "otsuki2024"} if published else {"seeds": 1}
        for scored, which in ((row.label, "true"), (row.target, "explained")):
            alone = insertion_deletion(model, x, maps, scored=scored, points=5, **how)
            number = row.values["score" if (which == "true") == published else f"score of the {which} class"]
            assert number == pytest.approx(float(alone.score), abs=1e-4)


def test_a_class_that_the_model_does_not_have_matters_to_the_published_protocol_alone(
    model: zoo.Model, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "00.png").write_bytes((photos / "00.png").read_bytes())
    (tmp_path / "labels.csv").write_text("file,class_index\n00.png,150\n")
    study = evaluate(model, tmp_path, ["random"], protocol="both", points=3, seeds=1)
    assert [row.protocol for row in study.rows] == ["tie-safe"]
    assert "score of the true class" not in study.rows[0].values
    assert len(study.failures) == 1


def test_together_a_map_without_ties_is_scored_once(model: zoo.Model) -> None:
    x = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    scored: list[int] = []

    def score(images: Tensor) -> Tensor:
        scored.append(len(images))
        return model.module(images).softmax(1)

    new, curves = {}, {}
    for protocol in ("both", "together"):
        unknown, target = torch.tensor([-1, -1]), torch.tensor([3, 4])
        method, score_once = methods.get("random"), Remembering(score)
        seen = Seen(model, method, ["a", "b"], x, target, unknown, [None] * 2, [0, 1], score_once).explained()
        published, safe = measures.make(["insertion-deletion"], protocol, {"points": 4, "seeds": 1})
        published.run(seen)
        scored.clear()
        curves[protocol] = [found[1] for found in safe.run(seen)]
        new[protocol] = sum(scored)
    assert new == {"both": 2 * 2 * 2, "together": 0}  # two points between the ends, of two curves and two images
    places = [round(k / 48**2, 5) for k in (0, 501, 1001, 2001, 48**2)]
    for found in curves["together"]:
        assert found["insertion fraction"] == found["deletion fraction"] == places


def test_an_image_that_cannot_be_read_is_named_and_costs_no_other(
    model: zoo.Model, photos: Path, tmp_path: Path
) -> None:
    for i, path in enumerate(sorted(photos.glob("*.png"))[:2]):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes())
    (tmp_path / "2.png").write_bytes(b"not an image")
    (tmp_path / "3.png").symlink_to("3.png")
    data = datasets.open(tmp_path)
    data = replace(data, samples=(*data.samples, Sample(tmp_path / "3.png", None, "3.png")))
    study = evaluate(model, data, ["random"], ["sparseness"])
    assert [row.image for row in study.rows] == ["0.png", "1.png"]
    assert sorted(study.failures) == ["2.png", "3.png"]
    assert all(name in why for name, why in study.failures.items())


# -- Metrics --


def test_every_metric_is_what_its_function_says(model: zoo.Model, located: Path) -> None:
    names = [name for name in measures.NAMES if name not in ("insertion-deletion", "grid-pointing-game")]
    study = evaluate(model, located, ["paper", "grad-cam"], names, batch_size=3)
    assert not study.failures
    x, data = inputs(model, located), datasets.open(located)
    tickets = [int(sample.key[:12], 16) for sample in data]
    for name in ("paper", "grad-cam"):
        method = methods.get(name)

        def summed(module: nn.Module, x: Tensor, target: Tensor, method: Method = method) -> Tensor:
            return method(module, x, target).sum(1, keepdim=True)

        target = model.module(x).argmax(1)
        maps = summed(model.module, x, target)
        cascade = torch.stack([*metrics.parameter_randomisation(summed, model, x, target, steps=5).values()], 1)
        boxes = torch.stack([data[i].objects(model.preparation) for i in (0, 1)])
        expected = {
            "road": metrics.road(model, x, maps, target, indices=tickets),
            "sparseness": metrics.sparseness(maps[:, 0]),
            "class-sensitivity": metrics.class_sensitivity(summed, model, x),
            "max-sensitivity": metrics.max_sensitivity(summed, model, x, target, indices=tickets),
            "randomisation": cascade.mean(1),
            "pointing-game": metrics.pointing_game(maps[:2], boxes),
            "energy-pointing": metrics.energy_pointing_game(maps[:2], boxes),
            "mass-accuracy": metrics.relevance_mass_accuracy(maps[:2], boxes),
            "rank-accuracy": metrics.relevance_rank_accuracy(maps[:2], boxes),
            "effective-heat-ratio": metrics.effective_heat_ratio(maps[:2], boxes),
        }
        found: dict[str, list[Row]] = {}
        for row in study.rows:
            if row.method == name:
                found.setdefault(row.metric, []).append(row)
        errors = found.pop("conservation-error", [])
        assert found.keys() == expected.keys()
        for metric, values in expected.items():
            assert [row.values[metric] for row in found[metric]] == pytest.approx(values.tolist(), abs=2e-4), metric
        assert [r.values["similarity when all is random"] for r in found["randomisation"]] == pytest.approx(
            cascade[:, -1].tolist(), abs=1e-4
        )
        assert len(errors) == (4 if name == "paper" else 0)
        assert all(row.values["conservation-error"] < 1e-5 for row in errors)


def test_what_does_not_apply_has_no_row_and_a_reason(model: zoo.Model, located: Path, tmp_path: Path) -> None:
    asked = ["pointing-game", "conservation-error"]
    study = evaluate(model, located, ["paper", "grad-cam", "paper+hq"], asked, out=tmp_path)
    assert not study.failures
    assert len(study.rows) == 2 * 3 + 4
    assert "promises no sum" in study.notes["conservation-error of grad-cam"]
    assert "promises no sum" in study.notes["conservation-error of paper+hq"]
    assert study.notes["pointing-game on 02.png and 1 other"] == "There is no row: where the object is, is not known."
    assert json.loads((tmp_path / "manifest.json").read_text())["notes"] == study.notes
    before = (tmp_path / "journal.sqlite").stat().st_mtime_ns
    again = evaluate(model, located, ["paper", "grad-cam", "paper+hq"], asked, out=tmp_path)
    assert again.notes == study.notes
    assert (tmp_path / "journal.sqlite").stat().st_mtime_ns == before


def test_rows_about_objects_depend_on_where_they_are(model: zoo.Model, located: Path, tmp_path: Path) -> None:
    data = datasets.open(located)
    moved = replace(data, samples=tuple(replace(s, box_source=((0, 0, 9, 9),)) for s in data.samples[:1]))
    asked: dict[str, Any] = {"methods": ["centre"], "metrics": ["mass-accuracy", "sparseness"], "out": tmp_path}
    first = evaluate(model, replace(data, samples=data.samples[:1]), **asked)
    second = evaluate(model, moved, **asked)
    keys = [{row.metric: row.key for row in study.rows} for study in (first, second)]
    assert keys[0]["sparseness"] == keys[1]["sparseness"]
    assert keys[0]["mass-accuracy"] != keys[1]["mass-accuracy"]


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        *[(name, "probability") for name in ("paper", "released", "epsilon", "iv", "paper-winner", "released-mixture")],
        *[(name, "logit") for name in ("captum-lrp", "captum-lrp-mixture", "captum-lrp-sums", "gradient-x-input")],
        *[(name, "difference") for name in ("integrated-gradients", "deeplift", "gradient-shap", "kernel-shap")],
        ("zennit-epsilon-plus-flat", "one"),
        ("paper+sum", "probability"),
        ("captum-lrp+sum", "logit"),
        *[(name, None) for name in ("grad-cam", "full-grad", "saliency", "rise", "random", "captum-lrp+hq")],
    ],
)
def test_what_a_method_should_sum_to(name: str, promise: str | None) -> None:
    assert probes._promise(methods.get(name)) == promise


def test_conservation_errors_are_relative_to_what_was_promised(model: zoo.Model, photos: Path) -> None:
    names = ["deeplift", "gradient-x-input", "epsilon"]
    study = evaluate(model, photos, names, ["conservation-error"], limit=3)
    x = inputs(model, photos)
    logits, empty = model.module(x), model.module(torch.zeros_like(x[:1]))
    for row in study.rows:
        i = int(row.image[:2])
        total = float(methods.get(row.method)(model, x[i, None], row.target).sum())
        promised = {
            "deeplift": float(logits[i, row.target] - empty[0, row.target]),
            "gradient-x-input": float(logits[i, row.target]),
            "epsilon": float(logits[i].softmax(0)[row.target]),
        }[row.method]
        error = abs(total - promised) / abs(promised)
        assert row.values["conservation-error"] == pytest.approx(error, rel=1e-3, abs=1e-5)
        assert (error < 1e-3) == (row.method == "deeplift")


def test_the_grid_game_takes_companions_of_other_classes_from_the_batch(model: zoo.Model, photos: Path) -> None:
    x, data = inputs(model, photos), datasets.open(photos)
    target = model.module(x).argmax(1).tolist()
    study = evaluate(model, photos, ["paper"], ["grid-pointing-game"], batch_size=8)
    assert len(set(target)) >= 4
    assert len(study.rows) == 8
    for i, row in enumerate(study.rows):
        others: list[int] = []
        for j in [*range(i + 1, 8), *range(i)]:
            if target[j] not in [target[k] for k in (i, *others)] and len(others) < 3:
                others.append(j)
        cell = int(data[i].key[:12], 16) % 4
        order = [*others[:cell], i, *others[cell:]]
        top, bottom = (torch.cat([x[j] for j in pair], 2) for pair in (order[:2], order[2:]))
        maps = methods.get("paper+sum")(model, torch.cat([top, bottom], 1)[None], target[i])[0, 0].clamp_min(0)
        inside = maps[cell // 2 * 32 :][:32, cell % 2 * 32 :][:, :32]
        assert row.values["grid-pointing-game"] == pytest.approx(float(inside.sum() / maps.sum()), rel=1e-3)


def test_the_grid_game_depends_on_the_batch_and_needs_four_classes(model: zoo.Model, photos: Path) -> None:
    asked: dict[str, Any] = {"methods": ["random"], "metrics": ["grid-pointing-game", "sparseness"]}
    keys = {}
    for size in (8, 5):
        study = evaluate(model, photos, batch_size=size, **asked)
        keys[size] = {(r.image, r.metric): r.key for r in study.rows}
    few = evaluate(model, photos, batch_size=3, **asked)
    assert all(keys[8]["00.png", m] == keys[5]["00.png", m] for m in ["sparseness"])
    assert keys[8]["00.png", "grid-pointing-game"] != keys[5]["00.png", "grid-pointing-game"]
    assert {row.metric for row in few.rows} == {"sparseness"}
    (who, why), *more = few.notes.items()
    assert not more
    assert who == "grid-pointing-game on 00.png and 7 others"
    assert "fewer than 4 classes" in why


# -- Shards and merging --


def test_shards_merge_into_the_whole(model: zoo.Model, photos: Path, tmp_path: Path, relprop: Relprop) -> None:
    asked: dict[str, Any] = {"metrics": ["insertion-deletion", "grid-pointing-game"], "points": 3, "seeds": 1}
    asked["batch_size"] = 5
    images = []
    for k in (1, 2, 3):
        study = evaluate(model, photos, METHODS, shard=(k, 3), out=tmp_path / f"{k}", **asked)
        images.append(len({row.image for row in study.rows}))
        assert study.manifest["shard"] == f"{k}/3"
    assert images == [5, 3, 0]  # every third batch; there are two
    evaluate(model, photos, METHODS, out=tmp_path / "whole", **asked)
    code, out, err = relprop("merge", *(tmp_path / f"{k}" for k in (1, 2, 3, 1)), "--out", tmp_path / "all")
    assert code == 0, err
    assert "1: 20 rows, 20 of them new" in out  # of four predicted classes, so that there is a grid game
    assert "2: 6 rows, 6 of them new" in out  # of three images, so that there is none
    assert "3: 0 rows, 0 of them new" in out
    agree(rows_of(tmp_path / "all"), rows_of(tmp_path / "whole"))
    told = json.loads((tmp_path / "all" / "manifest.json").read_text())
    assert [s["manifest"]["shard"] for s in told["sources"]] == ["1/3", "2/3", "3/3"]
    assert (told["images"], told["rows"], told["methods"]) == (8, 26, METHODS)
    assert (tmp_path / "all" / "rows.parquet").exists()
    # Into a folder that has rows already: nothing is new then.
    again = merge([tmp_path / "whole", tmp_path / "1"], tmp_path / "all")
    assert [(source.rows, source.added) for source in again.sources] == [(26, 26), (26, 0), (20, 0)]
    # Folders of results have no journals any more; their rows count all the same, and stay.
    for folder in (tmp_path / "2", tmp_path / "all"):
        (folder / "journal.sqlite").unlink()
    results = merge([tmp_path / "2"], tmp_path / "all")
    assert [(source.rows, source.added) for source in results.sources] == [(26, 26), (6, 0)]
    assert not (tmp_path / "2" / "journal.sqlite").exists()
    agree(rows_of(tmp_path / "all"), rows_of(tmp_path / "whole"))
    # A merged study goes on like any other.
    more = evaluate(model, photos, ["centre"], out=tmp_path / "all", **asked)
    assert len(more.rows) == 13
    assert more.manifest["history"][-1]["sources"]


def test_runs_that_a_table_would_mix_are_not_merged(
    model: zoo.Model, photos: Path, tmp_path: Path, relprop: Relprop
) -> None:
    def run(name: str, net: zoo.Model = model, metric: str = "insertion-deletion", **options: Any) -> Path:
        limit = options.pop("limit", 1)
        evaluate(net, photos, ["random"], [metric], out=tmp_path / name, limit=limit, **options)
        return tmp_path / name

    first, other = run("a", points=3, seeds=1), run("b", points=5, seeds=1, limit=2)
    weights = run("c", tiny.model(1), metric="sparseness")
    fine = run("d", metric="sparseness")
    for runs, words in (
        ((first, other), "differ in insertion-deletion tie-safe"),
        ((first, weights), "differ in the weights"),
        ((first, tmp_path / "nothing"), "holds no study"),
    ):
        code, out, err = relprop("merge", *runs, "--out", tmp_path / "all")
        assert (code, out) == (2, "")
        assert words in err
        assert not (tmp_path / "all").exists()
    with pytest.raises(RelpropError, match="is a URL, and only folders can be merged"):
        merge([first, Path("s3://mine/part2")], tmp_path / "all")
    for folder in (first, other):
        (folder / "manifest.json").unlink()  # the rows themselves tell as well
    with pytest.raises(RelpropError, match=r"different rows of random for \d\d\.png \(insertion-deletion tie-safe\)"):
        merge([first, other], tmp_path / "all")
    assert merge([first, fine], tmp_path / "all").rows == 2


def test_a_study_that_grows_scores_the_new_images_alone(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def run(_: nn.Module, x: Tensor, __: Tensor) -> Tensor:
        calls.append(len(x))
        return x.abs()

    for limit in (2, 5):
        study = evaluate(model, photos, [own("counted", run)], ["class-sensitivity"], limit=limit, out=tmp_path)
        assert len(study.rows) == limit
    assert calls == [2, 2, 5, 3]  # a batch is explained whole; its other classes are asked for where a row is lacking


def test_where_the_journal_is_gone_its_product_is_continued(
    model: zoo.Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"limit": 1, "points": 3, "seeds": 1, "out": tmp_path}
    first = evaluate(model, photos, ["random"], **ask)
    (tmp_path / "journal.sqlite").unlink()
    assert read(tmp_path) == list(first.rows)
    monkeypatch.setattr("relprop.study.runner.Runner._explain", None)  # nobody is to explain anything again
    assert evaluate(model, photos, ["random"], **ask).rows == first.rows
    # A run that was killed before it had taken the product in leaves a journal without rows.
    (tmp_path / "journal.sqlite").unlink()
    with Journal(tmp_path / "journal.sqlite"):
        pass
    assert evaluate(model, photos, ["random"], **ask).rows == first.rows
    assert [row.values for row in read(tmp_path, curves=False)] == [row.values for row in first.rows]


def test_two_halves_merge(tmp_path: Path) -> None:
    rows = [Row(f"k{i}", f"{i}.png", 0, 0, "paper", "m", "", {"score": i / 10}) for i in range(4)]
    with Journal(tmp_path / "a") as a, Journal(tmp_path / "b") as b:
        assert a.add(rows[:3]) == 3
        b.add(rows[1:])
        assert a.add(b) == 1
        assert sorted(r.key for r in a) == [r.key for r in rows]


# -- Kills, interrupts and failures --


def test_killed_twenty_times_it_ends_the_same(tmp_path: Path) -> None:
    photos, whole, broken = tiny.photos(tmp_path / "photos", 40), tmp_path / "whole", tmp_path / "broken"
    script = Path(__file__).with_name("kills.py")
    # A fork must not find threads that it does not have.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(photos), str(whole), str(broken), "20"]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == 20
    assert report["writing"] >= 1
    agree(rows_of(broken), rows_of(whole))
    tables = [str(tabulate(rows_of(folder), "random+hq")) for folder in (whole, broken)]
    assert tables[0] == tables[1]
    history = json.loads((broken / "manifest.json").read_text())["history"]
    (entry,) = history
    assert 15 < entry["runs"] <= 20  # one that is killed before its manifest is there leaves no trace
    assert "finished" not in history[0]


def test_a_batch_of_rows_is_all_or_nothing(tmp_path: Path) -> None:
    def rows() -> object:
        yield Row("k", "i.png", None, 0, "paper", "m", "", {"score": 1.0})
        raise KeyboardInterrupt

    with Journal(tmp_path / "j") as journal:
        with pytest.raises(KeyboardInterrupt):
            journal.add(rows())
        assert len(journal) == 0


def stumbling(model: zoo.Model, photos: Path, which: int, error: BaseException | None) -> Method:
    """Stumbles at one image; without an error, over a map of the wrong shape, which is nothing that was foreseen."""
    bad = inputs(model, photos)[which]

    def run(_: nn.Module, x: Tensor, __: Tensor) -> Tensor:
        if any(torch.equal(image, bad) for image in x):
            if error is None:
                return x[..., :-1]
            raise error
        return x.abs()

    return own("stumbling", run)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("a library stumbles.\nAnd tells a long story"), "a library stumbles"),
        (MemoryError(), "MemoryError"),
        (None, "Something unexpected, AssertionError: .*, line "),
    ],
)
def test_a_method_that_stumbles_over_an_image_costs_nothing_else(
    model: zoo.Model, photos: Path, error: Exception | None, words: str
) -> None:
    method = stumbling(model, photos, 2, error)
    study = evaluate(model, photos, ["random", method, "centre"], ["sparseness"], limit=5, batch_size=4)
    images = {name: {r.image for r in study.rows if r.method == name} for name in ("random", "stumbling", "centre")}
    assert len(images["random"]) == len(images["centre"]) == 5
    assert images["random"] - images["stumbling"] == {"02.png"}
    ((who, why),) = study.failures.items()
    assert who == "stumbling on 02.png"
    assert re.search(words, why)
    assert "\n" not in why


def test_a_metric_that_stumbles_costs_nothing_else(model: zoo.Model, photos: Path) -> None:
    calls: list[int] = []

    def run(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        calls.append(len(x))
        likely = module(x).argmax(1)
        return x[..., 1:] if (likely != target).any() else x.abs()  # another class than the predicted one is too much

    asked = ["sparseness", "class-sensitivity"]
    study = evaluate(model, photos, [own("narrow", run), "random"], asked, limit=3)
    assert len([row for row in study.rows if row.method == "narrow"]) == 3
    assert len([row for row in study.rows if row.method == "random"]) == 6
    ((who, why),) = study.failures.items()
    assert who.startswith("class-sensitivity of narrow on ")
    assert who.endswith("and 2 others")
    assert "AssertionError" in why
    assert calls == [3, 3, 1, 1, 1]  # the batch, its other classes, and these one by one


def test_a_grid_that_cannot_be_explained_is_a_failure(model: zoo.Model, photos: Path) -> None:
    def run(_: nn.Module, x: Tensor, __: Tensor) -> Tensor:
        if x.shape[2] > 32:
            raise RuntimeError("too large")
        return x.abs()

    study = evaluate(model, photos, [own("small", run)], ["sparseness", "grid-pointing-game"])
    assert {row.metric for row in study.rows} == {"sparseness"}
    ((who, why),) = study.failures.items()
    assert who == "grid-pointing-game of small on 00.png and 7 others"
    assert "too large" in why
    assert not study.notes


def test_numbers_that_are_none_are_failures(model: zoo.Model, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relprop.metrics.sanity.sparseness", lambda maps: torch.full((len(maps),), math.nan))
    study = evaluate(model, photos, ["random"], ["sparseness"], limit=2)
    assert not study.rows
    ((who, why),) = study.failures.items()
    assert who.startswith("sparseness of random on")
    assert "finite" in why


def test_an_interrupted_study_keeps_what_it_has_and_continues(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"metrics": ["sparseness"], "batch_size": 2, "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, photos, ["random", stumbling(model, photos, 3, KeyboardInterrupt())], **asked)
    assert [(r.method, r.image) for r in rows_of(tmp_path)] == [
        *[("random", f"{i:02d}.png") for i in range(4)],
        *[("stumbling", f"{i:02d}.png") for i in range(2)],
    ]
    stopped = json.loads((tmp_path / "manifest.json").read_text())
    assert "stopped" in stopped
    assert "finished" not in stopped
    study = evaluate(model, photos, ["random", own("stumbling", lambda _, x, __: x.abs())], **asked)
    assert len(study.rows) == 16
    assert study.manifest["history"][0]["stopped"] == stopped["stopped"]


def test_ctrl_c_at_a_shell_gets_a_sentence(
    model: zoo.Model, photos: Path, tmp_path: Path, relprop: Relprop, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = stumbling(model, photos, 5, KeyboardInterrupt())
    monkeypatch.setitem(methods._METHODS, "stumbling", method)
    monkeypatch.setattr("relprop.cli_study.load_model", lambda *_: model)
    asked = ("--methods", "stumbling", "--metrics", "sparseness", "--batch-size", 4, "--out", tmp_path)
    code, out, err = relprop("evaluate", photos, *asked)
    assert (code, out) == (130, "")
    assert "4 of 8 images" in err
    assert f"what was measured is in {tmp_path}, and the same command continues." in err
    assert len(rows_of(tmp_path)) == 4


def test_the_manifest_remembers_what_was_run_before(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    def run(method: str, engine: Local | None = None) -> Study:
        return evaluate(model, photos, [method], ["sparseness"], limit=1, out=tmp_path, engine=engine)

    assert "history" not in run("random").manifest
    for engine in (None, Local()):  # whoever works, it is the same request
        run("centre", engine)
    last = run("paper").manifest
    assert last["methods"] == ["paper"]
    assert [(e["methods"], e.get("runs")) for e in last["history"]] == [(["random"], None), (["centre"], 2)]
    assert all({"command", "started", "finished", "settings", "packages"} <= e.keys() for e in last["history"])
    assert json.loads((tmp_path / "manifest.json").read_text()) == json.loads(json.dumps(last, default=str))


# -- Progress --


def test_progress_tells_how_far_how_fast_and_what_so_far(model: zoo.Model, photos: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    asked: dict[str, Any] = {"protocol": "both", "points": 3, "seeds": 1, "batch_size": 4, "out": tmp_path}
    evaluate(model, photos, ["random"], limit=4, **asked)
    evaluate(model, photos, METHODS, ["insertion-deletion", "sparseness"], progress=told.append, **asked)
    assert [(p.done, p.fresh, p.total) for p in told] == [(d, d, 8) for d in (0, 2, 4, 6, 8)]
    assert told[0].rate is None
    assert told[-1].left == 0
    first, second = told[1], told[2]
    assert {column for method, column in first.means if method == "paper"} == {"otsuki2024", "tie-safe", "sparseness"}
    assert {m.n for m in first.means.values()} == {4}
    assert {method for method, _ in first.means} == {"paper"}
    assert {method for method, _ in second.means} == set(METHODS)
    rows = [r.values["score"] for r in rows_of(tmp_path) if (r.method, r.protocol) == ("paper", "tie-safe")]
    assert told[-1].means["paper", "tie-safe"] == Mean(pytest.approx(sum(rows) / 8), 8)
    told.clear()
    evaluate(model, photos, METHODS, progress=told.append, **asked)
    # Nobody knows yet that all of this smaller request is there; what is found there is done, and not done by this run.
    assert [(p.done, p.fresh) for p in told] == [(0, 0), (4, 0), (8, 0)]
    assert told[-1].means["paper", "tie-safe"] == Mean(pytest.approx(sum(rows) / 8), 8)
    told.clear()
    evaluate(model, photos, METHODS, progress=told.append, **asked)
    assert [(p.done, p.fresh) for p in told] == [(8, 0)]  # the same request again is told at once
    assert told[0].means["paper", "tie-safe"] == Mean(pytest.approx(sum(rows) / 8), 8)


def test_a_log_gets_a_line_now_and_then() -> None:
    def said(every: float) -> list[str]:
        text = io.StringIO()
        with Watch(Console(file=text), every) as watch:
            for done in range(4):
                watch(Progress(4 + done, 20, done, 10.0 * done, {("paper", "tie-safe"): Mean(0.25, done)}))
        return text.getvalue().splitlines()

    assert said(0) == [
        "5 of 20 images, 0.1 images/s, 2 min left",
        "6 of 20 images, 0.1 images/s, 2 min left",
        "7 of 20 images, 0.1 images/s, 2 min left",
    ]
    assert said(3600) == said(0)[::2]  # the first, and the last
    many = Progress(4, None, 4, 8.0, {}, {"a": 0.25, "b": 0.5})
    assert str(many) == "4 images, 0.5 images/s, 2 workers of 0.25 to 0.5 images/s"
    assert [spoken(s) for s in (0.4, 89, 100, 3600, 12_000)] == ["0 s", "89 s", "2 min", "60 min", "3 h 20 min"]


def test_a_terminal_sees_a_bar_and_the_means() -> None:
    text = io.StringIO()
    with Watch(Console(file=text, force_terminal=True, width=100, color_system=None)) as watch:
        means = {("paper", "tie-safe"): Mean(0.25, 5), ("random", "tie-safe"): Mean(-0.0123, 4)}
        watch(Progress(5, 20, 5, 10.0, means, {"worker-7": 0.75}))
        assert watch.last is not None
    seen = text.getvalue()
    assert "5/20" in seen
    assert "0.5 images/s, 30 s left" in seen
    assert "0.25 (5)" in seen
    assert "-0.0123 (4)" in seen
    assert re.search(r"worker-7 +0\.75", seen)


# -- Tables --


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


SINGLES = ("pointing-game", "road", "sparseness", "conservation-error")


def many_rows() -> list[Row]:
    rows = []
    for method in ("a", "b"):
        for protocol in ("otsuki2024", "tie-safe"):
            scores = {"insertion": 0.5, "deletion": 0.25, "score": 0.25, "spread": 0.1}
            rows.append(Row(method + protocol, "i", 0, 0, method, "insertion-deletion", protocol, scores))
        for metric in SINGLES[: 4 if method == "a" else 3]:
            value = 3e-8 if metric == "conservation-error" else 1.0
            rows.append(Row(method + metric, "i", 0, 0, method, metric, "", {metric: value}))
    return rows


def test_a_wide_table_comes_in_blocks() -> None:
    def heads(table: str) -> list[list[str]]:
        return [[c.strip() for c in block.splitlines()[0].split("|")[1:-1]] for block in table.split("\n\n")]

    rows = many_rows()
    six = [f"{n} ({p})" for p in ("otsuki2024", "tie-safe") for n in ("insertion", "deletion", "score")]
    assert heads(str(tabulate(rows))) == [["method", *six, "n"], ["method", *SINGLES, "n"]]
    narrow = ["score (otsuki2024)", "score (tie-safe)"]
    assert heads(str(tabulate(rows, columns=["score"]))) == [["method", *narrow, "n"]]
    assert heads(str(tabulate(rows, "b", ["score"]))) == [["method", *narrow, *[f"{n} - b" for n in narrow], "n"]]
    apart = heads(str(tabulate(rows, "b")))
    assert apart[:2] == [["method", *six, "n"], ["method", *[f"{n} - b" for n in six], "n"]]
    assert str(tabulate(rows)).count("3.0e-08 [3.0e-08, 3.0e-08]") == 1
    assert tabulate(rows).to("latex").count("\\begin{tabular}") == 2


def test_a_table_shows_what_is_asked_for() -> None:
    rows = many_rows()
    table = tabulate(rows, methods=["b", "a"], metrics=["insertion-deletion"], protocol="tie-safe")
    assert table.methods == ("b", "a")
    assert {where for where, _ in table.columns} == {"tie-safe"}
    against = tabulate(rows, "b", methods=["a"], metrics=["road", "sparseness"])
    assert against.methods == ("a",)
    assert against.columns == (("road", "road"), ("sparseness", "sparseness"))
    assert len(against.differences) == 2
    for bad, words in (
        ({"methods": ["c"]}, "method 'c' was not measured; there are a, b"),
        ({"metrics": ["beauty"]}, "metric 'beauty' was not measured"),
        ({"columns": ["beauty"]}, "number 'beauty' was not measured"),
        ({"protocol": "mine"}, "no protocol 'mine'"),
    ):
        with pytest.raises(RelpropError, match=words):
            tabulate(rows, **bad)
    with pytest.raises(RelpropError, match=r"i has two rows of a, road, measured under different settings"):
        tabulate([*rows, Row("other", "i", 0, 0, "a", "road", "", {"road": 0.5})])


def test_bad_requests_get_one_sentence(model: zoo.Model, photos: Path) -> None:
    for bad, words in (
        ({"methods": ["grad-kam"]}, "no method 'grad-kam'; the nearest are grad-cam"),
        ({"metrics": ["beauty"]}, "no metric 'beauty'"),
        ({"protocol": "mine"}, "no protocol 'mine'"),
        ({"points": 1}, "points is 1"),
        ({"points": "adaptive"}, "points are a number"),
        ({"points": [3, 4]}, "points are a number"),
        ({"baseline": "pink"}, "baseline 'pink' is unknown"),
        ({"baseline": torch.zeros(3)}, "baseline is a name"),
        ({"steps": 4}, "no option 'steps'"),
        ({"shard": (4, 3)}, "no shard 4 of 3"),
        ({"shard": (0, 3)}, "no shard 0 of 3"),
        ({"batch_size": 0}, "batch size is 0"),
    ):
        with pytest.raises(RelpropError, match=words):
            evaluate(model, photos, **bad)
    with pytest.raises(RelpropError, match=r"pass what relprop\.load returns"):
        evaluate(model.module, photos)
    with pytest.raises(RelpropError, match="no rows"):
        tabulate([])


def test_what_stands_for_missing_pixels_is_named_at_a_shell(photos: Path, tmp_path: Path, relprop: Relprop) -> None:
    asked = ("--model", "resnet18", "--weights", "random", "--limit", 1, "--methods", "centre", "--points", 3)
    for baseline in ("black", "mean"):
        code, _, err = relprop("evaluate", photos, *asked, "--baseline", baseline, "--out", tmp_path)
        assert code == 0, err
    first, second = (row.values["score"] for row in read(tmp_path))
    assert first != second
    code, _, err = relprop("evaluate", photos, *asked, "--baseline", "purple", "--out", tmp_path)
    assert code == 2
    assert "purple" in err


def test_the_verbs_of_a_shell(photos: Path, tmp_path: Path, relprop: Relprop) -> None:
    asked = ("--model", "resnet18", "--weights", "random", "--limit", 2, "--out", tmp_path)
    named = ("--methods", "random, centre", "--metrics", "sparseness,conservation-error")
    code, out, err = relprop("evaluate", photos, *named, *asked)
    assert code == 0, err
    assert "| random | " in out
    assert "2 of 2 images" in err
    assert "note: conservation-error of random: There are no rows" in err
    code, out, _ = relprop("table", tmp_path, "--reference", "centre", "--format", "csv")
    assert code == 0
    assert [row["method"] for row in csv.DictReader(io.StringIO(out))] == ["centre", "random"]
    code, out, _ = relprop("table", tmp_path, "--methods", "random", "--metrics", "sparseness")
    assert (code, len(out.splitlines())) == (0, 3)
    for arguments, words in (
        (("table", tmp_path / "nothing"), "holds no study"),
        (("table", tmp_path, "--metrics", "road"), "metric 'road' was not measured"),
        (("evaluate", photos, "--methods", "grad-kam", *asked), "no method 'grad-kam'"),
        (("evaluate", photos, "--shard", "a third", *asked), "write 3/16"),
    ):
        code, out, err = relprop(*arguments)
        assert (code, out) == (2, "")
        assert words in err
    code, out, _ = relprop("methods")
    assert code == 0
    assert len(out.splitlines()) > 30
    code, out, _ = relprop("metrics")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[: len(measures.NAMES)]] == list(measures.NAMES)
