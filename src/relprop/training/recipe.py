"""The recipe: how a network is trained."""

from __future__ import annotations

from dataclasses import dataclass

from relprop.errors import RelpropError

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent on the cross-entropy, as in the paper's appendix (Otsuki et al., 2024).

    Attributes:
        lr: The learning rate of the first epochs.
        momentum: Of the descent.
        weight_decay: Pulls all weights that are trained towards zero.
        batch_size: Images a step, over all devices.
        epochs: At most so many.
        step: After every so many epochs the learning rate is divided by ten.
        patience: It ends after so many epochs in a row without a lower validation loss.
        precision: Of the arithmetic, as Lightning Fabric calls it: ``32-true`` or ``bf16-mixed``.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch_size: int = 32
    epochs: int = 300
    step: int = 30
    patience: int = 6
    precision: str = "32-true"

    def __post_init__(self) -> None:
        whole = {"batch_size": 2, "epochs": 1, "step": 1, "patience": 1}  # a batch norm needs two images
        for name in ("lr", "momentum", "weight_decay", *whole):
            value, least = getattr(self, name), whole.get(name, 0)
            if not least <= value < float("inf") or (name == "lr" and value == 0):
                what = "above 0" if name == "lr" else f"at least {least}"
                raise RelpropError(f"The {name.replace('_', ' ')} cannot be {value}; it is {what}.")

    def lr_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        return self.lr / 10.0 ** (epoch // self.step)
