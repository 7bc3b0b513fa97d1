"""A worker: a process of a cluster that holds the model, traced and warmed once, and works on pieces."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from relprop import __version__
from relprop.compat import import_torchvision
from relprop.datasets import Sample
from relprop.memory import keep_freed
from relprop.study.forecast import Speed, speed
from relprop.study.outcome import Outcome
from relprop.study.pieces import Piece
from relprop.study.runner import Runner

__all__ = ["Hello", "Order", "Worker"]


@dataclass(frozen=True)
class Order:
    """What a worker needs to know of a study.

    Attributes:
        model: What ``relprop.load`` returns.
        named: The methods.
        wanted: The measures.
        batch_size: Images explained at once.
        precision: Of scoring.
        folder: Where paths begin that are relative.
    """

    model: Any
    named: Any
    wanted: Any
    batch_size: int
    precision: str
    folder: Path

    @classmethod
    def of(cls, run: Runner) -> Order:
        """What a runner knows, and where."""
        return cls(run.model, run.named, run.wanted, run.batch_size, run.precision, Path.cwd())


@dataclass(frozen=True)
class Hello:
    """What a worker says when it is ready.

    Attributes:
        node: The node that it is on.
        place: The machine's name and the process.
        machine: What the machine is.
        weights: A hash of the weights that arrived.
        versions: Of relprop and torch.
        device: Where it computes.
    """

    node: str
    place: str
    machine: str
    weights: str
    versions: tuple[str, str]
    device: str


class Worker:
    """Works on pieces.

    Args:
        order: A reference to the study's order, in a tuple, so that Ray leaves it to the worker to look: a torchvision
            that has to be helped is helped before a model of its is unpacked.
        name: What it is called.
        threads: For torch; a CPU worker has one.
        gpu: Whether it has a GPU, or a part of one.
    """

    _name = "that is starting"

    def __init__(self, order: tuple[Any], name: str, threads: int, gpu: bool) -> None:
        keep_freed()
        torch.set_num_threads(threads)
        with suppress(ImportError):
            import_torchvision()
        asked: Order = importlib.import_module("ray").get(order[0])
        with suppress(OSError):  # where all paths are absolute, there need not be such a folder
            os.chdir(asked.folder)
        self._name = name
        self._device = torch.device("cuda" if gpu else "cpu")
        model = asked.model
        if gpu:
            model = replace(model, module=model.module.to(self._device))
        self._run = Runner(model, asked.named, asked.wanted, asked.batch_size, asked.precision)
        self._run.told()  # what fits no method is known to whoever asked
        self._run.warm()
        self._images, self._seconds = 0.0, 0.0
        self._meters = _meters(name)

    def __repr__(self) -> str:
        return f"relprop {self._name}"  # as Ray's dashboard shows it

    def hello(self) -> Hello:
        """Says that it is ready."""
        return Hello(
            importlib.import_module("ray").get_runtime_context().get_node_id(),
            f"{platform.node()}:{os.getpid()}",
            f"{platform.machine()}, {os.cpu_count()} cores",
            self._run.weights,
            (__version__, torch.__version__),
            torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
        )

    def work(self, piece: Piece, known: Container[str]) -> Outcome:
        """Works on a piece."""
        outcome = self._run.work(piece, known)
        self._images += len(piece.samples) * len(self._run.groups[piece.group]) / len(self._run.named)
        self._seconds += outcome.seconds
        rows, pace = self._meters
        rows.inc(max(len(outcome.rows), 1e-9))
        pace.set(self._images / max(self._seconds, 1e-9))
        return outcome

    def speed(self, samples: Sequence[Sample]) -> Speed:
        """Measures how fast it is."""
        return speed(self._run, samples)


def _meters(name: str) -> tuple[Any, Any]:
    """What Ray's dashboard and Prometheus see of a worker."""
    metrics = importlib.import_module("ray.util.metrics")
    rows = metrics.Counter("relprop_rows", "Rows that were measured.", ("worker",))
    pace = metrics.Gauge("relprop_images_per_second", "Images a second, all methods done.", ("worker",))
    for meter in (rows, pace):
        meter.set_default_tags({"worker": name})
    return rows, pace
