"""The pictures of a comparison: overlays with their scores below, and the curves that those are the areas of."""

# ruff: noqa: PLC0415 - what takes long to import is imported where it paints, as in `relprop.heatmap`

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relprop.compare import PROTOCOLS, Comparison
from relprop.figure import RGB, glow, limit
from relprop.quiet import quietly

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

__all__ = ["SIDE", "curves", "grid", "layout"]

SIDE = 448
"""Pixels of an overlay's side: twice those of the usual input, so that each of them becomes a square."""

_DPI = 150
_MARGIN, _HEAD, _FOOT = 14, 34, 62
_ACROSS = 4  # pictures in a row, at most
_INK = "#222222"
# The colours of Okabe and Ito (2008), "Color Universal Design", without yellow, which is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
# Dashes and marks tell lines apart where colours do not, in print, say; these numbers have no divisor in common.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKS = ("o", "s", "^", "D", "v", "X", "P", "*", "p")
# A name with dollars in it is no formula.
_TEXT: dict[str, Any] = {"color": _INK, "parse_math": False}
_AXIS = {
    "otsuki2024": "part of the pixels moved, as the protocol counts them",
    "tie-safe": "part of the pixels moved",
}


def layout(pictures: int) -> tuple[int, int]:
    """Rows and columns for so many pictures, as even as can be."""
    rows = -(-pictures // _ACROSS)
    return rows, -(-pictures // rows)


def grid(comparison: Comparison, photo: Image, label: str = "", true: str = "") -> RGB:
    """The photo, and each method's overlay with its name above and its scores below.

    Every map has a scale of its own: what methods hand out is not in the same unit.

    Args:
        comparison: What to show.
        photo: What the model saw, as large as the maps.
        label: What the explained class is called.
        true: What the true class is called, where there is one.
    """
    from PIL import Image

    large = photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    maps = [comparison.heatmap(method) for method in comparison.methods]
    pictures = [np.asarray(large), *(glow(each, large, limit(each)) for each in maps)]
    heads = ["photo", *comparison.methods]
    feet = [_asked(comparison, label, true), *(_scores(comparison, method) for method in comparison.methods)]
    rows, columns = layout(len(pictures))
    figure = _figure(_MARGIN + columns * (SIDE + _MARGIN), rows * (_HEAD + SIDE + _FOOT) + _MARGIN)
    corners = []
    for place, (head, foot) in enumerate(zip(heads, feet, strict=True)):
        left = _MARGIN + place % columns * (SIDE + _MARGIN)
        top = place // columns * (_HEAD + SIDE + _FOOT) + _HEAD
        corners.append((left, top))
        middle = left + SIDE // 2
        _text(figure, (middle, top - 6), "bottom", _short(head), 9.5)
        for line, (text, size) in enumerate(zip(foot, (9, 8), strict=True)):
            _text(figure, (middle, top + SIDE + 6 + 25 * line), "top", text, size)
    sheet = _drawn(figure)
    for picture, (left, top) in zip(pictures, corners, strict=True):
        sheet[top : top + SIDE, left : left + SIDE] = picture  # matplotlib would blur it
    return sheet


def curves(comparison: Comparison) -> RGB:
    """The insertion curves above the deletion curves, a column for each protocol and a colour for each method."""
    labels = [_legend(comparison, method) for method in comparison.methods]
    columns = max(1, min(len(labels), 3 if max(map(len, labels), default=0) < 46 else 2))
    figure = _figure(1600, 1130 + 34 * -(-len(labels) // columns))
    drawn: Any = figure.subplots(2, len(PROTOCOLS), sharex=True, sharey=True)
    for row, kind in enumerate(("insertion", "deletion")):
        for column, (protocol, name) in enumerate(PROTOCOLS.items()):
            axes: Axes = drawn[row, column]
            for number, method in enumerate(comparison.methods):
                curve = getattr(comparison.scores[method][protocol].curves, kind)
                x, y = (values[0].numpy() for values in curve)
                axes.plot(x, y, **_line(number, len(comparison.methods), len(x)))
            better = "a larger area is better" if kind == "insertion" else "a smaller area is better"
            axes.set_title(f"{kind}, {name} ({better})", fontsize=9.5, **_TEXT)
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.tick_params(labelsize=8, labelcolor=_INK)
            axes.spines[["top", "right"]].set_visible(False)
            if row:
                axes.set_xlabel(_AXIS[protocol], fontsize=9, **_TEXT)
            if not column:
                axes.set_ylabel("probability of the scored class", fontsize=9, **_TEXT)
    top = drawn[0, 0].get_ylim()[1]
    drawn[0, 0].set(xlim=(-0.015, 1.015), ylim=(-0.02 * top, top))  # many a line runs along zero
    names = " / ".join(PROTOCOLS.values())
    legend = figure.legend(
        drawn[0, 0].get_lines(),
        labels,
        loc="outside lower center",
        ncols=columns,
        title=f"ID score = insertion \N{MINUS SIGN} deletion, {names}",
        frameon=False,
        fontsize=8.5,
        title_fontsize=9,
        handlelength=4,
        labelcolor=_INK,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return _drawn(figure)


def _line(number: int, count: int, points: int) -> dict[str, Any]:
    """How the line of one of so many methods is drawn: what lies on top is thinner, and marks are out of step."""
    every = max(1, points // 6)
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "linewidth": 2.4 - 1.2 * number / max(1, count - 1),
        "marker": _MARKS[number % len(_MARKS)],
        "markersize": 4,
        "markevery": (number % every, every),
    }


def _asked(comparison: Comparison, label: str, true: str) -> tuple[str, str]:
    """What stands below the photo: what was explained, and what was scored."""
    explained = f"explained: {_short(label or f'class {comparison.target}')}, {100 * comparison.probability:.0f} %"
    if comparison.true in (None, comparison.target):
        return explained, "scored: the same class, under both protocols"
    return explained, f"published scores the true class, {_short(true or f'class {comparison.true}')}"


def _scores(comparison: Comparison, method: str) -> tuple[str, str]:
    def both(score: str) -> list[str]:
        return [_number(comparison.number(method, protocol, score)) for protocol in PROTOCOLS]

    whole = " / ".join(f"{n} {name}" for n, name in zip(both("score"), PROTOCOLS.values(), strict=True))
    return f"ID {whole}", f"insertion {' / '.join(both('insertion'))},  deletion {' / '.join(both('deletion'))}"


def _legend(comparison: Comparison, method: str) -> str:
    numbers = " / ".join(_number(comparison.number(method, protocol)) for protocol in PROTOCOLS)
    return f"{_short(method)},  ID {numbers}"


def _number(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "\N{MINUS SIGN}")  # no -0.00


def _text(figure: Figure, at: tuple[int, int], side: str, text: str, size: float) -> None:
    """Writes a line above or below a picture, smaller where it would be wider than that."""
    across, down = figure.get_size_inches() * _DPI
    where: dict[str, Any] = {"ha": "center", "va": side}
    line = figure.text(at[0] / across, 1 - at[1] / down, text, fontsize=size, **where, **_TEXT)
    with quietly():  # a name may have letters that the font has not
        while line.get_window_extent().width > SIDE:  # widths are rounded, letter by letter, so it is not one division
            size *= 0.95
            line.set_fontsize(size)


def _short(text: str, most: int = 38) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _figure(width: int, height: int) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # the figure's own from now on: text is as wide as this draws it
    return figure


def _drawn(figure: Figure) -> RGB:
    canvas: Any = figure.canvas
    with quietly():  # a name may have letters that the font has not
        canvas.draw()
    return np.array(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]
