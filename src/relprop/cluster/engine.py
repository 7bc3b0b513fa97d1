"""The cluster as an engine of studies."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from relprop import __version__
from relprop.cluster.scheduler import UNREADY, WAIT, Hand, Scheduler, reason
from relprop.cluster.worker import Hello, Order, Worker
from relprop.datasets import Sample
from relprop.errors import RelpropError, saying
from relprop.study.forecast import Forecast, Speed, forecast
from relprop.study.log import Log
from relprop.study.output import Output
from relprop.study.pieces import Batch
from relprop.study.request import Request
from relprop.study.runner import Runner

__all__ = ["Cluster"]

_PATIENCE = 10.0


def _quiet(text: str) -> None:
    """Tells nobody."""


@dataclass
class Cluster:
    """A Ray cluster that works on the pieces of a study; pass it to :func:`relprop.evaluate` as ``engine``.

    Attributes:
        address: ``HOST:PORT`` or ``ray://HOST:PORT``; None for that in ``RAY_ADDRESS``, else one that runs on this
            machine, else a new one of this machine alone. Where Ray is connected already, that connection is used.
        workers: How many; None for as many as the cluster has room for, which may change.
        cpus: CPUs of each, which may be a fraction.
        gpus: GPUs of each, likewise.
        report: Told what a person should know.
    """

    address: str | None = None
    workers: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    report: Callable[[str], None] = _quiet
    _deaths: int = field(default=0, init=False, repr=False)
    _seen: dict[str, Hello] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise RelpropError(f"There cannot be {self.workers} workers; a study needs one at least.")
        if self.cpus < 0 or self.gpus < 0 or not self.cpus + self.gpus:
            raise RelpropError(f"A worker cannot have {self.cpus:g} CPUs and {self.gpus:g} GPUs; it needs some of one.")

    def __call__(self, run: Runner, batches: Iterable[Batch], log: Log) -> None:
        """Does what the log lacks.

        Raises:
            RelpropError: If there is no cluster, or it cannot do it.
        """
        with self.connected() as ray:
            # The object store hands the model on from node to node, and workers of one node share it.
            make, known = self._maker(ray, run), ray.put(log.known)

            def hire(name: str) -> Hand:
                made = make(name)
                return Hand(name, made, made.hello.remote())

            versions = (__version__, torch.__version__)
            scheduler = Scheduler(hire, self.room, known, log, self.report, run.weights, versions)
            try:
                scheduler(batches)
            finally:
                self._deaths, self._seen = scheduler.deaths, scheduler.seen

    def forecast(self, asked: Request, out: Output) -> Forecast:
        """What a study will be on this cluster, at the speed of one of its workers.

        Raises:
            RelpropError: If there is no cluster, or it cannot be measured.
        """
        with self.connected() as ray:
            made = self._maker(ray, asked.run)("measuring")

            def measured(samples: Sequence[Sample]) -> Speed:
                task = made.speed.remote(samples)
                while not ray.wait([task], timeout=WAIT)[0]:
                    self.report(UNREADY)
                try:
                    found: Speed = ray.get(task)
                except ray.exceptions.RayError as error:
                    raise RelpropError(f"No worker can measure its speed: {reason(error)}.") from error
                return found

            return forecast(asked, out, self.room(), measured)

    def _maker(self, ray: Any, run: Runner) -> Callable[[str], Any]:
        """What makes a worker of a name.

        Raises:
            RelpropError: If something cannot be sent to workers.
        """
        with saying("The model or a method cannot be sent to workers"):
            order = ray.put(Order.of(run))
        actor = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0, max_task_retries=0)(Worker)
        threads = max(1, int(self.cpus))
        return lambda name: actor.remote((order,), name, threads, self.gpus > 0)

    def about(self) -> dict[str, Any]:
        """What a manifest should tell of it."""
        return {
            "cluster": "ray " + importlib.import_module("ray").__version__,
            "CPUs a worker": self.cpus,
            "GPUs a worker": self.gpus,
            "workers that died": self._deaths,
            "workers": {name: f"{hello.place}, {hello.machine}, {hello.device}" for name, hello in self._seen.items()},
        }

    def room(self) -> int:
        """How many workers there should be; one at least, for a cluster may grow when it is asked to."""
        if self.workers is not None:
            return self.workers
        there = importlib.import_module("ray").cluster_resources()
        asked = {"CPU": self.cpus, "GPU": self.gpus}
        return max(1, min(int(there.get(kind, 0) / share) for kind, share in asked.items() if share))

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Ray, connected to the cluster.

        Raises:
            RelpropError: If ray is not installed, or there is no such cluster.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a study tells nobody that it runs
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise RelpropError("A cluster needs ray; install it with pip install 'relprop[ray]'.") from error
        if self.address is not None:
            _answers(self.address)
        if ray.is_initialized():  # the caller's own
            yield ray
            return
        try:
            ray.init(self.address, logging_level="error", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = self.address or "the address that Ray was told"
            first = next(iter(str(error).splitlines()), "no reason given").rstrip(".")
            raise RelpropError(f"No Ray cluster can be used at {where}: {first}.") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _answers(address: str) -> None:
    """Refuses an address at which nobody is: Ray itself would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or not port.isdigit():
        raise RelpropError(f"The address {address!r} is not understood; write HOST:PORT, as ray start prints it.")
    try:
        socket.create_connection((host, int(port)), _PATIENCE).close()
    except OSError as error:
        raise RelpropError(f"No Ray cluster answers at {address}: {error.strerror or error}.") from error
