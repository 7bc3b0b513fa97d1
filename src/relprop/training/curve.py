"""The curve: loss and accuracy over the epochs, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relprop.training.checkpoint import Epoch, best

__all__ = ["plot"]

_TRAINING, _VALIDATION, _GREY = "#9a9a9a", "#c0392b", "#555555"


def plot(epochs: Sequence[Epoch], path: Path, title: str) -> None:
    """Draws loss and accuracy side by side, and marks the epoch that gave the weights."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - where it paints
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    chosen = best(epochs)
    numbers = [epoch.epoch for epoch in epochs]
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(numbers, [getattr(e, name) for e in epochs], ".-", color=_TRAINING, label="training")
        axes.plot(
            numbers, [getattr(e, f"validation_{name}") for e in epochs], ".-", color=_VALIDATION, label="validation"
        )
        axes.axvline(chosen.epoch, color=_GREY, linewidth=0.8, linestyle=":", label=f"best, epoch {chosen.epoch}")
        axes.set(xlabel="epoch", ylabel="cross-entropy" if name == "loss" else name)
        axes.set_ylim(0, 1 if name == "accuracy" else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        if name == "loss":
            axes.legend(frameon=False, fontsize=8)
    partial = path.with_suffix(".partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)
