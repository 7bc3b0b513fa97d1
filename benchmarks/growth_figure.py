"""A figure of how cost grows: forward passes above, milliseconds an image below."""

from pathlib import Path
from typing import Any

from growth import HEADS
from matplotlib.figure import Figure

OURS, FORWARD, INK = "#2f6db3", "#e8833a", "#222222"  # as in the figures of `relprop explain`
ROOM = 1.25  # how much a panel's axis reaches beyond its largest value


def draw(data: dict[str, Any], path: Path) -> None:
    """Paint small multiples: a column for each thing that cost grows with.

    Args:
        data: What `growth.measure` returned.
        path: The picture to write.
    """
    figure = Figure(figsize=(11.5, 4.6), layout="constrained", facecolor="white")
    grid = figure.subplots(2, len(HEADS), sharex="col", squeeze=False)
    for column, (name, head) in enumerate(HEADS.items()):
        series = data["series"][name]
        sizes = [at["size"] for at in series]
        above, below = grid[0][column], grid[1][column]
        above.plot(sizes, [at["ratio"] for at in series], color=OURS, marker="o", markersize=3.5)
        above.set_ylim(0, ROOM * max(at["ratio"] for at in series))
        for key, colour, label in (("ms", OURS, "`paper`"), ("forward ms", FORWARD, "faster forward")):
            below.plot(sizes, [at[key] for at in series], color=colour, marker="o", markersize=3.5, label=label)
        below.set_ylim(0, ROOM * max(at["ms"] for at in series))
        for axes in (above, below):
            if name != "depth":
                axes.set_xscale("log")
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45 if len(sizes) > 5 else 0)
            axes.minorticks_off()
            axes.tick_params(labelsize=8, colors=INK)
            axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        below.set_xlabel(head, fontsize=9, color=INK)
    grid[0][0].set_ylabel("forward passes", fontsize=9, color=INK)
    grid[1][0].set_ylabel("ms an image", fontsize=9, color=INK)
    grid[1][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
