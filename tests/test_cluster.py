"""Studies on a cluster: the rows of one machine, whoever dies on the way."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from torch import Tensor, nn

import relprop
from relprop import RelpropError, datasets, zoo
from relprop.cli import main
from relprop.cli_study import spelled
from relprop.cluster import Cluster
from relprop.cluster.trials import Trials
from relprop.methods import Method
from relprop.study import Progress, evaluate, read, tabulate
from relprop.study.pieces import Batch, Piece

# Nothing is called but this machine, by its loopback address, and nobody is told that Ray is used.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Workers are to find this code, and the small network.
_PATHS = [str(Path(__file__).parent), str(Path(relprop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

ray_only = pytest.mark.xdist_group("ray")  # one cluster is enough
METHODS = ["paper", "random+hq"]
ASKED: dict[str, Any] = {"protocol": "both", "points": 3, "seeds": 1, "batch_size": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Workers have one, and the last digits depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.photos(tmp_path_factory.mktemp("photos") / "some", 40)


@pytest.fixture(scope="module")
def model() -> zoo.Model:
    return tiny.model()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes, with one CPU each."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    nodes = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    ray.init(nodes.address, logging_level="error", log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def own(name: str, run: Callable[[Tensor], None]) -> Method:
    """A method of a test's own, which does something on the way."""

    def maps(_: nn.Module, x: Tensor, __: Tensor) -> Tensor:
        run(x)
        return x.abs()

    return Method(name, "control", "none", 0, "a test's", maps)


def slow(x: Tensor) -> None:
    time.sleep(0.1 * len(x) / len(x))


# -- On a cluster --


@ray_only
def test_a_cluster_that_loses_a_node_has_the_rows_of_one_machine(
    model: zoo.Model, photos: Path, nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = [*METHODS, own("slow", slow)]
    monkeypatch.chdir(photos.parent)  # the nodes were started elsewhere
    photos = Path(photos.name)
    alone = evaluate(model, photos, methods, **ASKED)
    told: list[Progress] = []
    (lost,) = nodes.worker_nodes

    def progress(now: Progress) -> None:
        told.append(now)
        if now.done >= 10 and len(now.workers) == 2 and lost in nodes.worker_nodes:
            nodes.remove_node(lost, allow_graceful=False)

    study = evaluate(model, photos, methods, out=tmp_path, progress=progress, engine=Cluster(), **ASKED)
    assert lost not in nodes.worker_nodes
    assert study.manifest["engine"]["workers that died"] == 1
    assert not study.failures
    assert study.rows == alone.rows  # to the last digit
    assert str(study.table("random+hq")) == str(alone.table("random+hq"))
    assert (told[0].done, told[-1].done, told[-1].total) == (0, 40, 40)
    assert all(pace > 0 for pace in told[-1].workers.values())


@ray_only
@pytest.mark.usefixtures("nodes")
def test_an_image_that_ends_workers_is_set_aside_and_costs_no_other(
    model: zoo.Model, photos: Path, tmp_path: Path
) -> None:
    some = replace(datasets.open(photos), samples=datasets.open(photos).samples[:5])
    poison = model.prepare(some[2].path)
    fair = tmp_path / "once"

    def die(x: Tensor) -> None:
        if any(torch.equal(image, poison) for image in x):
            os.kill(os.getpid(), signal.SIGKILL)
        if len(x) == 1 and not fair.exists():  # the last batch ends a worker too, but not twice
            fair.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    engine = Cluster(cpus=0.5)
    study = evaluate(
        model, some, ["random", own("deadly", die)], ["sparseness"], batch_size=2, out=tmp_path, engine=engine
    )
    ((who, why),) = study.failures.items()
    assert who == "random, deadly on 02.png"
    assert why.startswith("Tried alone, it failed 2 times (")
    expected = {f"{i:02d}.png" for i in (0, 1, 3, 4)}
    assert {row.image for row in study.rows} == expected
    assert len(study.rows) == 8
    assert study.manifest["engine"]["workers that died"] == 5
    alone = evaluate(model, replace(some, samples=(*some.samples[:2], *some.samples[3:])), ["random"], ["sparseness"])
    assert [row.values for row in alone.rows] == [row.values for row in study.rows if row.method == "random"]


@ray_only
def test_a_driver_that_is_killed_continues(model: zoo.Model, photos: Path, nodes: Any, tmp_path: Path) -> None:
    """Another process is the driver; its rows go to a URL, and even its journal is lost."""
    url = f"file://{tmp_path}/study"
    (tmp_path / "driver.py").write_text(
        "import sys, tiny, test_cluster\n"
        "from relprop.study import evaluate, parts\n"
        "from relprop.cluster import Cluster\n"
        "parts.ROWS = 16\n"
        "evaluate(tiny.model(), sys.argv[1], [*test_cluster.METHODS, test_cluster.own('slow', test_cluster.slow)],\n"
        "    out=sys.argv[2], engine=Cluster(sys.argv[3], cpus=0.5), limit=20, **test_cluster.ASKED)\n"
    )
    command = [sys.executable, tmp_path / "driver.py", photos, url, nodes.address]
    home = {**os.environ, "RELPROP_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(command, env=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = tmp_path / "study" / "rows"
    while driver.poll() is None and len(list(parts.glob("part-*.parquet"))) < 2:
        time.sleep(0.05)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    before = {row.key for row in read(url)}
    assert before
    shutil.rmtree(tmp_path / "cache")
    told: list[Progress] = []
    methods = [*METHODS, own("slow", slow)]
    asked = {"limit": 20, **ASKED}
    study = evaluate(model, photos, methods, out=url, progress=told.append, engine=Cluster(cpus=0.5), **asked)
    assert told[0].done >= 2  # what was written counts
    alone = evaluate(model, photos, methods, **asked)
    assert study.rows == alone.rows
    assert before < {row.key for row in study.rows}
    assert str(tabulate(read(url))) == str(alone.table())
    files = [pq.read_table(file).num_rows for file in parts.glob("*")]
    assert sum(files) == len(study.rows)  # no row is in two parts


@ray_only
@pytest.mark.usefixtures("nodes")
def test_what_cannot_be_sent_to_workers_gets_a_sentence(model: zoo.Model, photos: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(RelpropError, match="cannot be sent to workers"):
        evaluate(model, photos, [own("locked", lambda _: lock.release())], engine=Cluster(), **ASKED)


@ray_only
def test_a_plan_is_printed_before_anything_runs(
    model: zoo.Model,
    photos: Path,
    nodes: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relprop.cli_study.load_model", lambda *_: model)
    words = ["evaluate", photos, "--ray", nodes.address, "--cpus-per-worker", "0.5", "--dry-run", "--out", tmp_path]
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words), "--points", "3", "--methods", "paper,grad-cam"])
    out, _ = capsys.readouterr()
    assert stop.value.code == 0
    assert "40 in 5 batches" in out
    assert "pieces    5: 1 group of methods on every batch; 0 done" in out
    assert "forwards  680; an image costs paper 9, grad-cam 7" in out
    assert re.search(r"speed     [\d.e+]+ forwards/s, measured with grad-cam on 4 images", out)
    assert re.search(r"time      .* of one worker, .* of (2|4)$", out, re.MULTILINE)  # two a node; one node may be gone
    assert not list(tmp_path.iterdir())


# -- Without a cluster --


def test_an_address_where_nobody_is_gets_a_sentence(model: zoo.Model, photos: Path) -> None:
    for engine, words in (
        (Cluster("127.0.0.1:9"), "No Ray cluster answers at 127.0.0.1:9: Connection refused"),
        (Cluster("nonsense"), "The address 'nonsense' is not understood; write HOST:PORT"),
    ):
        with pytest.raises(RelpropError, match=words):
            evaluate(model, photos, METHODS, engine=engine, **ASKED)
    with pytest.raises(RelpropError, match="needs some of one"):
        Cluster(cpus=0)
    with pytest.raises(RelpropError, match="There cannot be 0 workers"):
        Cluster(workers=0)


def test_ray_may_stand_alone_in_a_command() -> None:
    for words, expected in (
        ("evaluate x --ray", "evaluate x --ray auto"),
        ("evaluate --ray x --out y", "evaluate --ray auto x --out y"),
        ("evaluate x --ray --workers 3", "evaluate x --ray auto --workers 3"),
        ("evaluate x --ray head:6379 --out y", "evaluate x --ray head:6379 --out y"),
        ("evaluate x --ray ray://head:10001", "evaluate x --ray ray://head:10001"),
        ("evaluate x", "evaluate x"),
    ):
        assert spelled(words.split()) == expected.split()


def some_piece(images: int) -> Piece:
    return Piece(Batch(0, tuple(datasets.Sample(Path(f"{i}"), None, f"{i}") for i in range(images))), 0, "piece")


def test_nobody_is_set_aside_for_bad_luck() -> None:
    trials = Trials()
    piece = some_piece(2)
    assert trials.blame(piece, "once") == [piece]
    alone = trials.blame(piece, "twice")
    assert [[sample.name for sample in each.samples] for each in alone] == [["0"], ["1"]]
    assert trials.blame(alone[0], "once") == [alone[0]]  # unlucky again
    assert trials.acquit(alone[0]) == []
    assert trials.acquit(alone[1]) == [piece]  # one more chance
    assert not trials.aside


def test_what_only_a_whole_batch_does_sets_it_aside() -> None:
    trials = Trials()
    piece = some_piece(2)
    alone = [*trials.blame(piece, "x"), *trials.blame(piece, "x")][1:]
    assert [*trials.acquit(alone[0]), *trials.acquit(alone[1])] == [piece]
    assert trials.blame(piece, "x") == [piece]
    assert trials.blame(piece, "out of memory") == []
    assert [(name, "Together with its batch" in why) for _, name, why in trials.aside] == [("0", True), ("1", True)]


def test_one_image_that_ends_two_workers_is_set_aside_at_once() -> None:
    trials = Trials()
    piece = some_piece(1)
    assert trials.blame(piece, "x") == [piece]
    assert trials.blame(piece, "segmentation fault") == []
    ((_, name, why),) = trials.aside
    assert name == "0"
    assert why == "Tried alone, it failed 2 times (segmentation fault)."
