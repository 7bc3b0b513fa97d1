"""The viewer: maps as markup that ``viewer.js`` paints, with text for those who cannot see them."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from relprop.app.answer import Answer, Stop
from relprop.figure import limit
from relprop.heatmap import diverging
from relprop.runs import named

__all__ = ["COLOURS", "data_uri", "described", "script", "style", "view", "views"]

COLOURS = {
    "viridis": "viridis",
    "cividis": "cividis",
    "inferno": "inferno",
    "gray": "grey",
    "RdBu_r": "red and blue, signed",
    "PuOr_r": "orange and purple, signed",
}
"""Colour maps that colour-blind people can read, and what they are called."""

_THIRDS = (
    ("in the upper left", "in the upper middle", "in the upper right"),
    ("on the left", "in the middle", "on the right"),
    ("in the lower left", "in the lower middle", "in the lower right"),
)


@cache
def script() -> str:
    """The code of the viewer, with its colours."""
    import matplotlib  # noqa: PLC0415 - it takes long, and only what paints needs it

    tables = {
        name: {
            "title": title,
            "diverging": diverging(name),
            "table": _text(np.asarray(matplotlib.colormaps[name](np.arange(256), bytes=True))[:, :3].tobytes()),
        }
        for name, title in COLOURS.items()
    }
    known = f"const COLOURS = {json.dumps(tables)}, STYLE = {json.dumps(_file('viewer.css'))};"
    return f"{{\n{known}\n{_file('viewer.js')}}}"


@cache
def style() -> str:
    """How everything looks."""
    return _file("style.css")


def view(
    stops: Sequence[Stop],
    label: str,
    photo: Image.Image | None = None,
    name: str = "",
    panes: Sequence[str] = ("photo", "heat", "overlay"),
    *,
    controls: bool = True,
    total: bool = True,
) -> str:
    """Markup for one or several maps of the same photo.

    Args:
        stops: The maps; the last one is shown first.
        label: What they are of.
        photo: What the model saw; without it there is no overlay.
        name: What the photo is called.
        panes: Which pictures, side by side.
        controls: Whether to show quantisation, opacity and colours.
        total: Whether a value is a part of a whole.
    """
    maps = [
        {
            "name": stop.name,
            "height": stop.map.shape[0],
            "width": stop.map.shape[1],
            "values": _text(stop.map.detach().cpu().float().contiguous().numpy().astype("<f4").tobytes()),
            "limit": limit(stop.map),
            "total": float(stop.map.double().sum()) if total else None,
            "alt": described(stop.map),
        }
        for stop in stops
    ]
    content: dict[str, Any] = {
        "photo": None if photo is None else data_uri(photo),
        "alt": f"The photo {name}, as the model sees it",
        "captions": {"heat": f"relevance for {label}", "overlay": "the same, over the photo"},
        "maps": maps,
        "panes": [pane for pane in panes if photo is not None or pane == "heat"],
        "controls": controls,
    }
    return f'<relprop-map data-view="{html.escape(json.dumps(content))}"></relprop-map>'


def views(answer: Answer) -> str:
    """The pictures of an answer: the map, or the difference of two where there is a contrast."""
    if answer.contrast is None:
        return view(answer.stops[-1:], answer.label, answer.photo, answer.name)
    about, difference = answer.contrast
    label = f"{named(answer.row['target'])} and not {named(about)}"
    return view([Stop("the pixels", difference)], label, answer.photo, answer.name, total=False)


def described(map: Tensor) -> str:  # noqa: A002 - a map is a map
    """Where a map is strong, in words."""
    values = map.detach().double().cpu()
    if not bool(values.any()):
        return "No relevance anywhere."
    signed = bool((values < 0).any())
    text = f"{'What speaks for it is ' if signed else ''}{_where(values.clamp(min=0))}"
    if signed:
        text += f"; what speaks against it is {_where((-values).clamp(min=0))}"
    return f"{text[0].upper()}{text[1:]}."


def _where(values: Tensor) -> str:
    whole = values.sum()
    if not whole > 0:
        return "nowhere"
    thirds = [[part.sum() for part in rows.tensor_split(3, 1)] for rows in values.tensor_split(3, 0)]
    row, column = max(((r, c) for r in range(3) for c in range(3)), key=lambda at: float(thirds[at[0]][at[1]]))
    ordered = values.flatten().sort(descending=True).values.cumsum(0)
    few = int((ordered < whole / 2).sum()) + 1
    return f"strongest {_THIRDS[row][column]}, half of it in {100 * few / values.numel():.0f} % of the area"


def data_uri(picture: Image.Image) -> str:
    """A picture as an address that holds it."""
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{_text(file.getvalue())}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _file(name: str) -> str:
    return resources.files("relprop.app").joinpath(name).read_text(encoding="utf-8")
