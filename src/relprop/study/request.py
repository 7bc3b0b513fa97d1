"""A request: what a study is asked for, checked before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relprop import datasets, methods, requests
from relprop.datasets import Dataset, Stream, streams
from relprop.errors import RelpropError
from relprop.methods import Method
from relprop.study import measures, pieces
from relprop.study.pieces import Batch, Shard
from relprop.study.runner import Runner

__all__ = ["Request"]


@dataclass(frozen=True, eq=False)
class Request:
    """What a study is asked for.

    Attributes:
        data: The images.
        run: What explains and measures them.
        shard: Which part of them, or None.
        images: How many these are; None where only reading them would tell.
    """

    data: Dataset | Stream
    run: Runner
    shard: Shard | None
    images: int | None

    @classmethod
    def of(
        cls,
        model: Any,
        data: Dataset | Stream | str | os.PathLike[str],
        names: Sequence[str | Method],
        metrics: Sequence[str],
        protocol: str,
        limit: int | None,
        seed: int,
        shard: Shard | None,
        batch_size: int,
        precision: str,
        options: Mapping[str, Any],
    ) -> Request:
        """What :func:`relprop.evaluate` is asked for.

        Raises:
            RelpropError: If it cannot be met.
        """
        if not hasattr(model, "prepare") or not hasattr(model, "preparation"):
            msg = "A study needs to know how the model wants its images; pass what relprop.load returns."
            raise RelpropError(msg)
        requests.module(model)
        chosen = data if isinstance(data, Dataset | Stream) else streams.read(os.fspath(data)) or datasets.open(data)
        chosen = chosen if limit is None else chosen.limit(limit, seed)
        named = [m if isinstance(m, Method) else methods.get(m) for m in dict.fromkeys(names)]
        wanted = measures.make(metrics, protocol, options)
        pieces.batches(chosen, batch_size, shard)  # refuses what cannot be
        run = Runner(model, named, wanted, batch_size, precision)
        return cls(chosen, run, shard, pieces.count(chosen, batch_size, shard))

    def batches(self) -> Iterator[Batch]:
        """The batches, from the first one on."""
        return pieces.batches(self.data, self.run.batch_size, self.shard)
