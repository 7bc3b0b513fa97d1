"""Figures: an image, its heatmap, and the way that relevance took through the residual blocks."""

# ruff: noqa: A001, A002, PLC0415
# A001, A002: a map is a map. PLC0415: what takes long to import is imported where it paints, as in `relprop.heatmap`.

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relprop.errors import RelpropError
from relprop.quiet import quietly

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from torch import Tensor

    from relprop.graph import Graph
    from relprop.ledger import Ledger
    from relprop.plans import Plan
    from relprop.result import Explanation

__all__ = [
    "FILES",
    "RGB",
    "Share",
    "flow",
    "glow",
    "limit",
    "panel",
    "pictures",
    "sample",
    "save",
    "shares",
    "workplace",
]

RGB: TypeAlias = npt.NDArray[np.uint8]

FILES = (
    *("figure.png", "panel.png", "photo.png"),
    *("heatmap.png", "overlay.png", "quantized.png", "overlay-quantized.png"),
)
"""The pictures that there may be of one explanation."""

_SKIP, _PROJECTION, _RESIDUAL, _TRUNK = "#2f6db3", "#8db8e2", "#e8833a", "#c9c9c9"
_INK = "#222222"
_DPI = 150
_SIDE, _MARGIN, _HEAD = 448, 14, 40  # pixels: twice those of the usual input, so that each of them becomes a square
_FLOW = 990
_CLOSE = 26  # more blocks than this leave no room for a number on each
_GAP = 0.3  # how far a block's branches part, in units of the whole relevance
_TURN = 0.42  # the part of a block's length in which they do


@dataclass(frozen=True)
class Share:
    """How relevance was parted at one merge.

    Attributes:
        node: Its name.
        block: The number of the residual block that it closes.
        residual: The share that the residual branch got; the skip got the rest.
        identity: Whether the skip is an identity.
    """

    node: str
    block: int
    residual: float
    identity: bool

    @property
    def skip(self) -> float:
        """The share that took the skip."""
        return 1 - self.residual


def shares(ledger: Ledger, graph: Graph) -> list[Share]:
    """How relevance was parted at every merge that any of it reached, from input to output.

    Shares are of sums of absolute values, which are the relevance itself where none of it is negative.
    """
    result = []
    for i, node in enumerate(graph):
        if node.merge is None:
            continue
        sizes = [float(ledger.edges[i, j][1][0, 0]) if (i, j) in ledger.edges else 0.0 for j in node.inputs]
        if whole := sum(sizes):
            identity = any(branch in node.identities for branch in range(len(sizes)) if branch != node.main)
            result.append(Share(node.name, node.merge, sizes[node.main] / whole, identity))
    return result


def limit(map: Tensor) -> float:
    """The value that gets the strongest colour: one in 200 is larger.

    A few pixels always stand far above all others, and with them as the scale the rest would be dark.
    """
    strength = map.abs().flatten().double()
    return float(strength.quantile(0.995)) or float(strength.max()) or 1.0


def glow(map: Tensor, photo: Image, limit: float) -> RGB:
    """Lays a map over the grey photo that it explains, the more opaque the stronger; without heat the photo is bare.

    Args:
        map: A map (H, W).
        photo: The photo; where it is larger than the map, a value of that becomes a square.
        limit: The value that gets the strongest colour.
    """
    from PIL import Image

    from relprop.heatmap import colorize

    def enlarged(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.asarray(Image.fromarray(values).resize(photo.size, Image.Resampling.NEAREST), dtype=np.float64)

    strength = (map.abs().double() / limit).clamp(0, 1).cpu().float().numpy() ** 0.75 * 0.9
    opacity = enlarged(strength)[..., None]
    grey = np.asarray(photo.convert("L").convert("RGB"), dtype=np.float64)
    return (opacity * enlarged(colorize(map, limit=limit)) + (1 - opacity) * grey).round().astype(np.uint8)


def sample(e: Explanation, i: int) -> Explanation:
    """One sample of a batch, with its part of the ledger."""

    def one(amount: Tensor) -> Tensor:
        return amount[:, i : i + 1]

    ledger = replace(
        e.ledger,
        start=one(e.ledger.start),
        scale=one(e.ledger.scale),
        edges={edge: (one(amount), one(size)) for edge, (amount, size) in e.ledger.edges.items()},
        absorbed={n: {cause: one(amount) for cause, amount in c.items()} for n, c in e.ledger.absorbed.items()},
    )
    parts = {name: getattr(e, name)[i : i + 1] for name in ("relevance", "target", "start", "output")}
    layers = {call: relevance[i : i + 1] for call, relevance in e.layers.items()}
    return replace(e, ledger=ledger, layers=layers, **parts)


def pictures(
    explanation: Explanation, plan: Plan, photo: Image, quantized: Tensor | None = None, label: str = ""
) -> dict[str, RGB]:
    """All pictures of an explanation of one sample, by the names of their files.

    Args:
        explanation: Of one sample and one target.
        plan: The plan that it was made by.
        photo: What the model saw, as large as the map.
        quantized: Its heatmap, quantised; None to leave that out.
        label: Name of the target.
    """
    from relprop.heatmap import colorize

    map = explanation.heatmap[0]
    top = limit(map)
    captions = ["photo", _caption(label), "the same, quantised"]
    result = [flow(explanation, plan, photo, label), panel(photo, map, quantized, captions), np.asarray(photo)]
    for each in (map, quantized):
        if each is not None:
            result += [colorize(each, limit=top), glow(each, photo, top)]
    return dict(zip(FILES, result, strict=False))


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A passing folder to make files in, inside the folder that they go to, which is made if it is missing.

    It is removed in the end, and so are folders that were made for nothing.

    Raises:
        RelpropError: Nothing can be written there.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            work = TemporaryDirectory(prefix=".relprop-", dir=folder, ignore_cleanup_errors=True)
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or error
            raise RelpropError(f"The results cannot go to {folder}: {reason}.") from error
        with work as name:
            yield Path(name)
    finally:
        for path in missing:
            with suppress(OSError):  # it is not empty, or was never made
                path.rmdir()


def save(explanation: Explanation, pictures: Mapping[str, RGB], work: Path, folder: Path) -> list[Path]:
    """Writes pictures, arrays and a manifest into a folder; `Explanation.load` reads it.

    Everything is made elsewhere first, so that what cannot be made costs nothing that was there.

    What an earlier call wrote there is replaced, and other files are left alone.

    Args:
        explanation: Of one sample.
        pictures: By the names of their files.
        work: A folder on the same disk, where the files are made first.
        folder: Where they go; made if it is missing.

    Returns:
        The files, the pictures first.

    Raises:
        RelpropError: The folder is a file.
        OSError: Something cannot be written.
    """
    from PIL import Image

    if folder.exists() and not folder.is_dir():
        raise RelpropError(f"{folder} is a file, where the results should go into a folder of that name.")
    made = work / folder.name
    saved = explanation.save(made, quantize=False)
    for file in made.glob("heatmap-*.png"):  # it is among the pictures, with better colours
        file.unlink()
    for name, picture in pictures.items():
        Image.fromarray(picture).save(made / name)
    names = [*pictures, *(file.name for file in saved if (made / file.name).exists())]
    manifest = json.loads((made / names[-1]).read_text(encoding="utf-8"))
    manifest["files"] = {name: hashlib.sha256((made / name).read_bytes()).hexdigest() for name in names[:-1]}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    (made / names[-1]).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if folder.exists():
        for name in names:
            (made / name).replace(folder / name)
        for name in {*FILES} - {*names}:
            (folder / name).unlink(missing_ok=True)
    else:
        made.rename(folder)
    return [folder / name for name in names]


def panel(photo: Image, heatmap: Tensor, quantized: Tensor | None = None, captions: Sequence[str] = ()) -> RGB:
    """The photo, the heatmap over it and, beside that, the quantised one, in the same colours.

    Args:
        photo: What the model saw, as large as the maps.
        heatmap: A map (H, W).
        quantized: The same, quantised.
        captions: What stands above each picture.
    """
    top = limit(heatmap)
    large = _large(photo)
    pictures = [np.asarray(large)] + [glow(map, large, top) for map in (heatmap, quantized) if map is not None]
    return _drawn(_figure(pictures, captions), pictures)


def flow(explanation: Explanation, plan: Plan, photo: Image, label: str = "") -> RGB:
    """The photo, its heatmap, and the shares of relevance that took the skips on the way from the output to it.

    Args:
        explanation: Of one sample and one target.
        plan: The plan that it was made by.
        photo: What the model saw, as large as the map.
        label: Name of the target.
    """
    map = explanation.heatmap[0]
    parted = shares(explanation.ledger, plan.graph)
    large = _large(photo)
    pictures = [np.asarray(large), glow(map, large, limit(map))]
    figure = _figure(pictures, ["photo", _caption(label)], _FLOW if parted else 0)
    if parted:
        axes = _axes(figure, 2, _FLOW)
        _flow(axes, parted, label)
        error = float(explanation.ledger.error.max())
        axes.set_title(f"the way back through {len(parted)} residual blocks (conservation error {error:.0e})", **_TEXT)
    return _drawn(figure, pictures)


# A name with dollars in it is no formula.
_TEXT: dict[str, Any] = {"fontsize": 9, "color": _INK, "parse_math": False}


def _flow(axes: Axes, parted: Sequence[Share], label: str) -> None:
    """A band of constant width that opens at every block: above what takes the skip, below what the branch gets."""
    from matplotlib.patches import Patch

    count = len(parted)
    axes.fill_between([-0.02 * count, 1.02 * count], -0.5, 0.5, color=_TRUNK, linewidth=0)
    x = np.linspace(0.0, 1.0, 61)
    rise = np.clip(np.minimum(x, 1 - x) / _TURN, 0, 1)
    apart = _GAP / 2 * (3 - 2 * rise) * rise**2
    for i, share in enumerate(parted):
        at = i + 0.03 + 0.94 * x
        axes.fill_between(at, -0.5 - apart, 0.5 + apart, color="white", linewidth=0)
        cut = share.residual - 0.5
        colour = _SKIP if share.identity else _PROJECTION
        axes.fill_between(at, cut + apart, 0.5 + apart, color=colour, linewidth=0)
        axes.fill_between(at, -0.5 - apart, cut - apart, color=_RESIDUAL, linewidth=0)
        if count <= _CLOSE:
            for y, part in ((1, share.skip), (-1, share.residual)):
                where = (i + 0.5, y * (0.5 + _GAP / 2 + 0.045))
                axes.text(*where, f"{100 * part:.0f}", ha="center", va="center", fontsize=6.5, color=_INK)
    _stages(axes, parted)
    axes.fill([-0.02 * count, -0.02 * count, -0.06 * count], [-0.62, 0.62, 0], color=_TRUNK, linewidth=0)
    axes.text(1.025 * count, 0, _short(label) or "output", rotation=90, ha="left", va="center", **_TEXT)
    skips = sum(share.skip for share in parted) / count
    handles = [Patch(color=_SKIP, label=f"through the skip, {100 * skips:.0f} % on average")]
    if not all(share.identity for share in parted):
        handles.append(Patch(color=_PROJECTION, label="the same, a projection"))
    handles.append(Patch(color=_RESIDUAL, label=f"through the residual branch, {100 * (1 - skips):.0f} %"))
    axes.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=8, columnspacing=1.2)
    axes.set_xlim(-0.065 * count, 1.045 * count)
    axes.set_ylim(-1.2, 0.78)
    axes.axis("off")


def _stages(axes: Axes, parted: Sequence[Share]) -> None:
    """The names of the modules that hold the blocks, such as layer1, below those."""
    start = 0
    for name, members in groupby(share.node.split(".")[0] if "." in share.node else "" for share in parted):
        end = start + len(list(members))
        if name:
            axes.plot([start + 0.1, end - 0.1], [-0.8, -0.8], color=_INK, linewidth=0.8)
            axes.text((start + end) / 2, -0.83, name, ha="center", va="top", **_TEXT)
        start = end


def _caption(label: str) -> str:
    return f"relevance for {_short(label)}" if label else "relevance"


def _short(label: str) -> str:
    """A label that fits above a picture; its end stays, for that is a number."""
    return label if len(label) <= 32 else f"{label[:21]} … {label[-8:]}"


def _large(photo: Image) -> Image:
    from PIL import Image

    return photo.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)


def _figure(pictures: Sequence[RGB], captions: Sequence[str], more: int = 0) -> Figure:
    """A sheet with room for pictures in a row, captions above them, and so many pixels for something else."""
    from matplotlib.figure import Figure

    width = len(pictures) * (_SIDE + _MARGIN) + _MARGIN + (more + _MARGIN if more else 0)
    figure = Figure(figsize=(width / _DPI, (_SIDE + _HEAD + _MARGIN) / _DPI), dpi=_DPI, facecolor="white")
    for place, caption in zip(range(len(pictures)), captions, strict=False):
        axes = _axes(figure, place, _SIDE)
        axes.set_title(caption, **_TEXT)
        axes.axis("off")
    return figure


def _axes(figure: Figure, place: int, width: int) -> Axes:
    across, up = figure.get_size_inches() * _DPI
    return figure.add_axes((_left(place) / across, _MARGIN / up, width / across, _SIDE / up))


def _left(place: int) -> int:
    return _MARGIN + place * (_SIDE + _MARGIN)


def _drawn(figure: Figure, pictures: Sequence[RGB]) -> RGB:
    """The sheet with its pictures, which matplotlib has no part in, so that they keep their exact pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    with quietly():  # a name may have letters that the font has not
        canvas.draw()
    sheet = np.array(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]
    for place, picture in enumerate(pictures):
        sheet[_HEAD : _HEAD + _SIDE, _left(place) : _left(place) + _SIDE] = picture
    return sheet
