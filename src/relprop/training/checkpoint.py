"""Checkpoints: where a training was at the end of an epoch, in one file that is whole or not there."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relprop.errors import RelpropError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Epoch", "best", "load", "log", "save"]


class Epoch(NamedTuple):
    """What there is to say of an epoch; it is a line of the log.

    Attributes:
        epoch: Its number, from 1 on.
        lr: The learning rate.
        loss: Mean cross-entropy while it was trained.
        accuracy: Likewise.
        validation_loss: At its end.
        validation_accuracy: Likewise.
        seconds: What it took.
    """

    epoch: int
    lr: float
    loss: float
    accuracy: float
    validation_loss: float
    validation_accuracy: float
    seconds: float


def best(epochs: Sequence[Epoch]) -> Epoch:
    """The first epoch with the lowest validation loss, which gives the weights."""
    return min(epochs, key=lambda epoch: epoch.validation_loss)


def save(fabric: Fabric, path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; a kill at any moment leaves the one before or this one."""
    partial = path.with_suffix(".partial")
    fabric.save(partial, state)
    if fabric.is_global_zero:
        partial.replace(path)
    fabric.barrier()


def load(fabric: Fabric, path: Path, state: dict[str, Any]) -> None:
    """Puts a checkpoint back into a state, if there is one.

    Raises:
        RelpropError: If it is damaged, or of another training.
    """
    if not path.exists():
        return
    try:
        said = fabric.load(path, weights_only=True)["request"]
        if said == state["request"]:
            fabric.load(path, state, weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise RelpropError(f"The checkpoint {path} is damaged ({first}); remove it to start again.") from error
    if said != state["request"]:
        raise RelpropError(
            f"{path.parent} holds another training, with other data, weights or settings; pass another --out, or "
            "remove it."
        )


def log(path: Path, epochs: Sequence[Epoch]) -> None:
    """Writes the log, a line an epoch."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Epoch._fields)
        writer.writerows([f"{value:.6g}" for value in epoch] for epoch in epochs)
    partial.replace(path)
