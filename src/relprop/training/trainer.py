"""The trainer: epochs of gradient descent, each of which can be the last before a kill and the first after it.

All that is left to chance in an epoch, the order of the images, their crops and what the network itself draws, depends
on the seed and the number of the epoch, so a run that continues draws what it would have drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop.datasets import Sample
from relprop.errors import RelpropError
from relprop.study.progress import spoken
from relprop.training import checkpoint
from relprop.training.checkpoint import Epoch, best
from relprop.training.features import Tick
from relprop.training.feeds import Feed, Pair, shuffled
from relprop.training.parts import Parts
from relprop.training.recipe import Recipe
from relprop.training.views import lot

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Trainer"]

_EXAMINED = 4
"""Batches of a test are so many times larger: nothing is kept for a way back."""


@dataclass(eq=False)
class Trainer:
    """Trains a module on the batches of a feed.

    Attributes:
        fabric: Which devices, and at which precision.
        module: What is trained.
        feed: Where the training and validation images come from.
        parts: Which those are.
        recipe: How.
        seed: Of everything that is left to chance.
        folder: Where the checkpoint and the log are.
        request: What this training is, in JSON; a checkpoint of another is refused.
        say: Told of every epoch, in a line.
        tick: Told of every step.
    """

    fabric: Fabric
    module: nn.Module
    feed: Feed
    parts: Parts
    recipe: Recipe
    seed: int
    folder: Path
    request: str
    say: Callable[[str], None]
    tick: Tick

    def __post_init__(self) -> None:
        if self.recipe.batch_size % self.fabric.world_size:
            raise RelpropError(
                f"A batch of {self.recipe.batch_size} cannot be parted among {self.fabric.world_size} devices evenly."
            )
        self.share = self.recipe.batch_size // self.fabric.world_size
        descent = torch.optim.SGD(
            self.module.parameters(),
            self.recipe.lr,
            momentum=self.recipe.momentum,
            weight_decay=self.recipe.weight_decay,
        )
        self.wrapped, self.optimizer = self.fabric.setup(self.module, descent)

    def run(self) -> list[Epoch]:
        """Trains until the recipe says that it is enough; the module has then the weights of its best epoch."""
        state: dict[str, Any] = {
            "model": self.wrapped,
            "optimizer": self.optimizer,
            "best": {},
            "epochs": [],
            "request": self.request,
        }
        path = self.folder / "checkpoint.pt"
        checkpoint.load(self.fabric, path, state)
        epochs = [Epoch(int(row[0]), *row[1:]) for row in state["epochs"]]
        if len(epochs) > self.recipe.epochs:
            raise RelpropError(
                f"The training in {self.folder} has had {len(epochs)} epochs, and {self.recipe.epochs} are asked for; "
                "choose another --out."
            )
        if epochs:
            self.say(f"seed {self.seed}: continues after epoch {len(epochs)}")
        while not self.enough(epochs):
            epochs.append(self._epoch(len(epochs)))
            if best(epochs) is epochs[-1]:
                state["best"] = {k: v.detach().cpu().clone() for k, v in self.module.state_dict().items()}
            state["epochs"] = [list(map(float, epoch)) for epoch in epochs]
            checkpoint.save(self.fabric, path, state)
            if self.fabric.is_global_zero:
                checkpoint.log(self.folder / "log.csv", epochs)
            self.say(self._told(epochs))
        self.module.load_state_dict(state["best"])
        return epochs

    def enough(self, epochs: Sequence[Epoch]) -> bool:
        """Whether the last epoch was the last."""
        if not epochs or len(epochs) >= self.recipe.epochs:
            return bool(epochs)
        return len(epochs) - best(epochs).epoch >= self.recipe.patience

    def _epoch(self, number: int) -> Epoch:
        began = time.monotonic()
        lr = self.recipe.lr_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rank = self.fabric.global_rank
        samples = shuffled(self.parts.train, self.seed, number, self.share, rank, self.fabric.world_size)
        total = math.ceil(len(samples) / self.share)
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.random.fork_rng():
            torch.manual_seed(lot("epoch", self.seed, number, rank))
            self.wrapped.train()
            batches = self._moved(self.feed.drawn(samples, self.share, "crop", self.seed, number))
            for step, (x, y) in enumerate(batches, 1):
                output = self.wrapped(x)
                loss = F.cross_entropy(output, y)
                self.optimizer.zero_grad()
                self.fabric.backward(loss)
                self.optimizer.step()
                sums += _sums(loss, output, y)
                self.tick(step, total, f"seed {self.seed}, epoch {number + 1}, loss {float(sums[0] / sums[2]):.3f}")
        loss_now, accuracy = self._means(sums)
        if self.fabric.world_size > 1:  # each device has seen other images; what is kept is the first one's
            for buffer in self.module.buffers():
                buffer.copy_(self.fabric.broadcast(buffer))
        found = self.examine(self.feed, self.parts.validation.samples)
        if not math.isfinite(loss_now + found[0]):
            raise RelpropError(f"The loss is no longer finite in epoch {number + 1}; lower the learning rate {lr:g}.")
        return Epoch(number + 1, lr, loss_now, accuracy, *found, time.monotonic() - began)

    def examine(self, feed: Feed, samples: Sequence[Sample]) -> tuple[float, float]:
        """Mean cross-entropy and accuracy on images as the model wants them."""
        sums = torch.zeros(3, dtype=torch.float64)
        mine = samples[self.fabric.global_rank :: self.fabric.world_size]
        self.wrapped.eval()
        with torch.no_grad():
            for x, y in self._moved(feed.plain(mine, _EXAMINED * self.share)):
                output = self.wrapped(x)
                sums += _sums(F.cross_entropy(output, y), output, y)
                self.tick(int(sums[2]), len(mine), f"seed {self.seed}, examined")
        return self._means(sums)

    def _moved(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            yield self.fabric.to_device(pair)

    def _means(self, sums: Tensor) -> tuple[float, float]:
        """Loss and accuracy over all devices."""
        whole = self.fabric.all_reduce(self.fabric.to_device(sums.float()), reduce_op="sum")
        assert isinstance(whole, Tensor)
        loss, right, count = whole.tolist()
        return loss / count, right / count

    def _told(self, epochs: Sequence[Epoch]) -> str:
        last = epochs[-1]
        text = (
            f"seed {self.seed}, epoch {last.epoch}: loss {last.loss:.3f}, accuracy {last.accuracy:.3f}; validation "
            f"{last.validation_loss:.3f}, {last.validation_accuracy:.3f}; {spoken(last.seconds)}"
        )
        if self.enough(epochs):
            return f"{text}; done, the best was epoch {best(epochs).epoch}"
        recent = [epoch.seconds for epoch in epochs[-5:]]
        return f"{text}, at most {spoken(sum(recent) / len(recent) * (self.recipe.epochs - last.epoch))} left"


def _sums(loss: Tensor, output: Tensor, y: Tensor) -> Tensor:
    right = (output.argmax(1) == y).sum()
    return torch.tensor([float(loss.detach()) * len(y), float(right), float(len(y))], dtype=torch.float64)
