"""Studies on a cluster: the rows of one machine, whoever dies on the way."""

import os
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

import pytest
import tiny
import torch
from torch import Tensor, nn

import relprop
from relprop import RelpropError, datasets, zoo
from relprop.cli import main
from relprop.cluster import Cluster
from relprop.cluster.trials import Trials
from relprop.methods import Method
from relprop.study import Progress, Study, evaluate, read, tabulate
from relprop.study.pieces import Batch, Piece

# Nothing is called but this machine, by its loopback address, and nobody is told that Ray is used.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Workers are to find this code, and the small network.
_PATHS = [str(Path(__file__).parent), str(Path(relprop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

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
def local(model: zoo.Model, photos: Path) -> Study:
    return evaluate(model, photos, METHODS, **ASKED)


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


def slow(seconds: float) -> Method:
    """As random, but with time for something to happen."""

    def run(_: nn.Module, x: Tensor, __: Tensor) -> Tensor:
        time.sleep(seconds)
        return x.abs()

    return Method("slow", "control", "none", 0, "a test's", run)


def test_a_cluster_that_loses_a_node_has_the_rows_of_one_machine(
    model: zoo.Model, photos: Path, nodes: Any, tmp_path: Path
) -> None:
    methods = [*METHODS, slow(0.1)]
    alone = evaluate(model, photos, methods, **ASKED)
    told: list[Progress] = []
    lost = nodes.add_node(num_cpus=1, object_store_memory=80_000_000)

    def progress(now: Progress) -> None:
        told.append(now)
        if now.done >= 16 and len(now.workers) == 3 and lost in nodes.worker_nodes:
            nodes.remove_node(lost, allow_graceful=False)

    study = evaluate(model, photos, methods, out=tmp_path, progress=progress, engine=Cluster(), **ASKED)
    assert lost not in nodes.worker_nodes
    assert study.manifest["engine"]["workers that died"] == 1
    assert not study.failures
    assert study.rows == alone.rows  # to the last digit
    assert str(study.table("random+hq")) == str(alone.table("random+hq"))
    assert (told[0].done, told[-1].done, told[-1].total) == (0, 40, 40)
    assert all(pace > 0 for pace in told[-1].workers.values())
