"""Heatmaps: Heat Quantization, colours, overlays and the PNG files that show them."""

# ruff: noqa: A002, PLC0415
# A002: a map is a map. PLC0415: matplotlib and PIL are imported where they paint, so that `import relprop` stays fast.

from __future__ import annotations

import os
import uuid
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relprop.errors import RelpropError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from PIL.Image import Image

__all__ = ["Edges", "Picture", "colorize", "diverging", "heat_quantization", "overlay", "save_png"]

Edges: TypeAlias = Literal["paper", "released"]
"""Where Heat Quantization puts its edges."""

Picture: TypeAlias = Union["Image", npt.NDArray[np.uint8], Tensor]
"""A PIL image, a uint8 array (H, W, 3) or a float tensor (3, H, W) with values in 0..1."""

RGB: TypeAlias = npt.NDArray[np.uint8]

_STRIP = 16  # rows that a one-dimensional map is painted with: enough to be seen, few enough for long signals
_DIVERGING = {"PiYG", "PRGn", "BrBG", "PuOr", "RdGy", "RdBu", "RdYlBu", "RdYlGn", "Spectral"}
_DIVERGING |= {"coolwarm", "bwr", "seismic", "berlin", "managua", "vanimo"}


def heat_quantization(maps: Tensor, levels: int = 8, edges: Edges = "paper", dims: int = 2) -> Tensor:
    """Drops every value of a map to the edge below it, on equally spaced edges from the map's minimum to its maximum.

    The paper's equation (Otsuki et al. 2024, "Layer-Wise Relevance Propagation with Conservation Property for ResNet",
    the last one of the method section), with Q levels::

        alpha = min + floor((alpha_R - min) / ((max - min) / Q)) * Q

    As printed it multiplies by Q where the bin width ``(max - min) / Q`` is meant: only then do the values stay
    between minimum and maximum. The width is what is used here. The maximum is an edge of its own, so ``"paper"``
    gives up to Q + 1 values. The released code spaces Q edges instead and so gives up to Q values, of width
    ``(max - min) / (Q - 1)``: that is ``"released"``.

    The edges are rounded to the map's dtype before values are compared with them, so the result never exceeds the
    map, quantizing twice changes nothing, and no range is too small or too large.

    Args:
        maps: floating-point maps; the trailing ``dims`` axes are one map, the axes in front are batch.
        levels: Q, at least 2.
        edges: ``"paper"`` (width range / Q) or ``"released"`` (width range / (Q - 1)).
        dims: how many trailing axes make one map.

    Returns:
        A new tensor of the same shape and dtype. A constant map comes back unchanged.

    Raises:
        RelpropError: ``maps`` is not a floating-point tensor, is not finite or has fewer than ``dims`` axes,
            or ``levels``, ``edges`` or ``dims`` is none of the above.
    """
    _check_quantization(maps, levels, edges, dims)
    if maps.numel() == 0:
        return maps.detach().clone()
    steps = levels if edges == "paper" else levels - 1
    flat = maps.detach().reshape(*maps.shape[: maps.dim() - dims], -1)
    values = flat.double().contiguous()
    grid = _grid(values, steps).to(maps.dtype)
    # Both sides of the comparison are in double, which holds every value of the narrower dtypes exactly.
    below = torch.searchsorted(grid.double(), values, right=True) - 1
    quantized = grid.gather(-1, below)
    constant = (values.amin(-1, keepdim=True) == values.amax(-1, keepdim=True)).expand_as(flat)
    return torch.where(constant, flat, quantized).reshape(maps.shape)


def colorize(map: Tensor | npt.NDArray[Any], cmap: str | Colormap | None = None, limit: float | None = None) -> RGB:
    """Paints a map: zero is white, blue is negative and red positive; without negative values zero is black.

    Args:
        map: a map (H, W), or (L,), which becomes a strip.
        cmap: a matplotlib colour map; by default ``"RdBu_r"`` where there are negative values, else ``"inferno"``.
            The scale is symmetric around zero for negative values and for matplotlib's diverging maps.
        limit: the absolute value with the strongest colour, the map's own largest by default; give one to make
            several maps comparable. What lies beyond is clipped.

    Returns:
        A uint8 array (H, W, 3).

    Raises:
        RelpropError: the map cannot be painted, the colour map is unknown or the limit is not positive.
    """
    return _paint(_plane(map), cmap, limit)[0]


def overlay(
    map: Tensor | npt.NDArray[Any],
    image: Picture,
    opacity: float = 0.6,
    *,
    grey: bool = True,
    cmap: str | Colormap | None = None,
    limit: float | None = None,
) -> RGB:
    """Lays a map over the image that it explains, which is resized to the map.

    Args:
        map: a map (H, W).
        image: a PIL image, a uint8 array (H, W, 3) or a float tensor (3, H, W) with values in 0..1.
        opacity: 0 shows the image alone, 1 the heat alone.
        grey: take the image's colours away, so that they cannot be mistaken for heat.
        cmap: as for `colorize`.
        limit: as for `colorize`.

    Returns:
        A uint8 array (H, W, 3).

    Raises:
        RelpropError: the map or the image cannot be painted, or the opacity is not in 0..1.
    """
    return _blend(_paint(_plane(map), cmap, limit)[0], map, image, opacity, grey)


def diverging(cmap: str) -> bool:
    """Whether a matplotlib colour map has a middle, which stands for zero."""
    return cmap.removesuffix("_r") in _DIVERGING


def save_png(
    map: Tensor | npt.NDArray[Any],
    path: str | os.PathLike[str],
    image: Picture | None = None,
    colorbar: bool = False,
    *,
    opacity: float = 0.6,
    grey: bool = True,
    cmap: str | Colormap | None = None,
    limit: float | None = None,
) -> Path:
    """Writes a map as a PNG, over an image if there is one; a file is there completely or not at all.

    Args:
        map: a map (H, W), or (L,), which becomes a strip.
        path: a file name that ends in ``.png``; missing folders are made.
        image: what to lay the map over, as for `overlay`.
        colorbar: add a bar with the values of the colours; without it one pixel of the file is one value of the map.
        opacity: as for `overlay`.
        grey: as for `overlay`.
        cmap: as for `colorize`.
        limit: as for `colorize`.

    Returns:
        The path.

    Raises:
        RelpropError: the map or the image cannot be painted, or the name does not end in ``.png``.
    """
    from PIL import Image

    path = Path(path)
    if path.suffix.lower() != ".png":
        raise RelpropError(f"A heatmap is written as PNG, so its name must end in .png, not {path.name!r}.")
    rgb, colours, lowest, top = _paint(_plane(map), cmap, limit)
    if image is not None:
        rgb = _blend(rgb, map, image, opacity, grey)
    if colorbar:
        rgb = _with_bar(rgb, colours, lowest, top)
    buffer = BytesIO()
    Image.fromarray(rgb).save(buffer, format="PNG")
    _write(path, buffer.getvalue())
    return path


def _check_quantization(maps: Tensor, levels: int, edges: str, dims: int) -> None:
    if not isinstance(maps, Tensor) or not maps.is_floating_point():
        kind = f"{maps.dtype}" if isinstance(maps, Tensor) else type(maps).__name__
        raise RelpropError(f"Heat Quantization takes a floating-point tensor, not {kind}.")
    if not isinstance(levels, int) or levels < 2:
        raise RelpropError(f"levels must be an integer of at least 2, not {levels!r}.")
    if edges not in ("paper", "released"):
        raise RelpropError(f'edges must be "paper" or "released", not {edges!r}.')
    if not isinstance(dims, int) or not 1 <= dims <= maps.dim():
        raise RelpropError(f"dims must be between 1 and the {maps.dim()} axes of the maps, not {dims!r}.")
    if not maps.isfinite().all():
        raise RelpropError("The map holds NaN or infinite values, which no level can stand for.")


def _grid(values: Tensor, steps: int) -> Tensor:
    """The ascending edges (..., steps + 1) of each row of values, the first its minimum and the last its maximum."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    # A range may be beyond double itself; a power of two brings it back without rounding.
    unit = torch.where(high / 2 - low / 2 > 2.0**960, 2.0**-60, 1.0).to(values)
    index = torch.arange(steps + 1, dtype=values.dtype, device=values.device)
    grid = (low * unit + (high * unit - low * unit) * index / steps) / unit
    return torch.cat([low, grid[..., 1:-1], high], -1)


def _plane(map: Tensor | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """A map as a finite two-dimensional array, a line as a strip."""
    if map.is_complex() if isinstance(map, Tensor) else np.iscomplexobj(map):
        raise RelpropError("A complex map has no colours; paint its absolute value or its real part.")
    values = map.detach().cpu().double().numpy() if isinstance(map, Tensor) else np.asarray(map, dtype=np.float64)
    if values.ndim not in (1, 2) or values.size == 0:
        raise RelpropError(
            f"Only maps (H, W) and (L,) can be painted, not one of shape {values.shape}; take one map of a batch, "
            "one slice of a volume."
        )
    if not np.isfinite(values).all():
        raise RelpropError("The map holds NaN or infinite values, which have no colour.")
    return np.repeat(values[None], _STRIP, axis=0) if values.ndim == 1 else values


def _paint(
    values: npt.NDArray[np.float64], cmap: str | Colormap | None, limit: float | None
) -> tuple[RGB, Colormap, float, float]:
    """The colours of a map, and their scale: colour map, its lower end (-1 or 0) and the value of its upper end, 1."""
    import matplotlib

    negative = bool(values.min() < 0)
    cmap = cmap or ("RdBu_r" if negative else "inferno")
    if isinstance(cmap, str):
        if cmap not in matplotlib.colormaps:
            raise RelpropError(f"matplotlib has no colour map {cmap!r}; matplotlib.colormaps lists what there is.")
        cmap = matplotlib.colormaps[cmap]
    if limit is not None and not 0 < limit < float("inf"):
        raise RelpropError(f"limit must be a positive number, not {limit!r}.")
    top = float(limit or np.abs(values).max() or 1.0)
    # A positive map in diverging colours would call its smallest value negative.
    lowest = -1.0 if negative or diverging(cmap.name) else 0.0
    # Clipped before dividing: a tiny limit must not push a large value to infinity.
    position = (values.clip(-top, top) / top - lowest) / (1.0 - lowest)
    return np.asarray(cmap(position, bytes=True), dtype=np.uint8)[..., :3], cmap, lowest, top


def _blend(heat: RGB, map: Tensor | npt.NDArray[Any], image: Picture, opacity: float, grey: bool) -> RGB:
    if np.ndim(map) != 2:
        raise RelpropError(f"Only a map (H, W) can be laid over an image, not one of shape {tuple(np.shape(map))}.")
    if not 0 <= opacity <= 1:
        raise RelpropError(f"opacity must be between 0 and 1, not {opacity!r}.")
    height, width = heat.shape[:2]
    picture = _picture(image).resize((width, height))
    backdrop = np.asarray(picture.convert("L").convert("RGB") if grey else picture, dtype=np.float64)
    return (opacity * heat + (1 - opacity) * backdrop).round().astype(np.uint8)


def _picture(image: Picture) -> Image:
    """Any accepted image as a PIL image in RGB."""
    from PIL import Image

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, Tensor) and image.dim() == 3 and image.shape[0] == 3 and image.is_floating_point():
        pixels = image.detach().double().cpu()
        # Resizing and undoing a normalization overshoot by a rounding; a normalized image does by far more.
        if not ((pixels > -1e-3) & (pixels < 1 + 1e-3)).all():
            raise RelpropError("The image tensor has values outside 0..1; undo the normalization before painting it.")
        image = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(image))
    what = f"{type(image).__name__} {tuple(getattr(image, 'shape', ()))} {getattr(image, 'dtype', '')}".strip()
    raise RelpropError(
        f"An image is a PIL image, a uint8 array (H, W, 3) or a float tensor (3, H, W) in 0..1, not {what}."
    )


def _with_bar(rgb: RGB, colours: Colormap, lowest: float, top: float) -> RGB:
    """The picture, enlarged if it is small, on white with a labelled colour bar to its right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    zoom = max(1, 256 // max(rgb.shape[:2]))
    rgb = rgb.repeat(zoom, axis=0).repeat(zoom, axis=1)
    margin, bar, panel = 12, 16, 96
    height = max(rgb.shape[0], 128) + 2 * margin  # a lower bar has no room for its labels
    dpi = 128  # a power of two, so that inches come back as the very same pixels
    figure = Figure(figsize=(panel / dpi, height / dpi), dpi=dpi, facecolor="white")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, margin / height, bar / panel, 1 - 2 * margin / height))
    # The bar runs over -1..1 or 0..1 and only its labels carry the values: no range is too extreme for its ticks.
    scale = figure.colorbar(ScalarMappable(Normalize(lowest, 1.0), colours), cax=axes)
    ticks = np.linspace(lowest, 1.0, 5)
    scale.set_ticks(list(ticks), labels=[f"{tick * top:.3g}" for tick in ticks])
    axes.tick_params(labelsize=8, labelcolor="black")
    canvas.draw()
    # Only the bar is drawn by matplotlib, so that the map keeps its exact pixels.
    sheet = np.full((height, rgb.shape[1] + 2 * margin + panel, 3), 255, dtype=np.uint8)
    down = (height - rgb.shape[0]) // 2
    sheet[down : down + rgb.shape[0], margin : margin + rgb.shape[1]] = rgb
    sheet[:, -panel:] = np.asarray(canvas.buffer_rgba())[..., :3]
    return sheet


def _write(path: Path, data: bytes) -> None:
    """Writes a file under a passing name beside its own, then renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    passing = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        passing.write_bytes(data)
        passing.replace(path)
    finally:
        passing.unlink(missing_ok=True)
