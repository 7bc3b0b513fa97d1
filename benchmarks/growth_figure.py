"""A figure of how cost grows: forward passes above, milliseconds an image below."""

from pathlib import Path
from typing import Any

from growth import HEADS
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

OURS, FORWARD, INK = "#2f6db3", "#e8833a", "#222222"  # as in the figures of `relprop explain`
LINES = (
    {"relprop, paper": ("ratio", OURS)},
    {"relprop, paper": ("ms", OURS), "faster forward": ("forward ms", FORWARD)},
)
"""What the panels of each row show: by its label, what is measured and the colour."""
ROOM = 1.25  # how much a panel's axis reaches beyond its largest value
STEEP = {("ratio", "targets"), ("ms", "targets"), ("ms", "side")}  # what has a logarithmic axis


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
        for axes, lines in zip(grid[:, column], LINES, strict=True):
            values = {label: [at[key] for at in series] for label, (key, _) in lines.items()}
            for label, (_, colour) in lines.items():
                axes.plot(sizes, values[label], color=colour, marker="o", markersize=3.5, label=label)
            if (lines["relprop, paper"][0], name) in STEEP:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:,.0f}")
                axes.yaxis.set_minor_formatter(NullFormatter())
            else:
                axes.set_ylim(0, ROOM * max(map(max, values.values())))
                axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            if name != "depth":
                axes.set_xscale("log")
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45 if len(sizes) > 4 else 0)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.tick_params(labelsize=8, colors=INK)
            axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        grid[1][column].set_xlabel(head, fontsize=9, color=INK)
    grid[0][0].set_ylabel("forward passes", fontsize=9, color=INK)
    grid[1][0].set_ylabel("ms an image", fontsize=9, color=INK)
    grid[1][0].legend(frameon=False, fontsize=8)
    figure.align_xlabels()
    figure.savefig(path, dpi=150)
