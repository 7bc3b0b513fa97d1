"""Localisation: whether relevance lies where the object is.

Every measure takes heatmaps ``(B, H, W)``, or with channels ``(B, C, H, W)``, which are summed, and regions, booleans
``(B, H, W)``, which `box_masks` makes of boxes. It returns a number between 0 and 1 a sample, ``(B,)`` in float64.

Relevance against the class says nothing of where the object is, so what adds relevance up adds its positive part; what
only compares values takes them as they are. Pixels that tie are treated alike: the result is what breaking the ties at
random would give on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relprop.errors import RelpropError
from relprop.metrics.ranking import heat

__all__ = [
    "box_masks",
    "effective_heat_ratio",
    "energy_pointing_game",
    "grid_images",
    "grid_pointing_game",
    "pointing_game",
    "relevance_mass_accuracy",
    "relevance_rank_accuracy",
]


def box_masks(boxes: Sequence[Any] | Tensor, size: tuple[int, int]) -> Tensor:
    """The pixels whose centres lie in a box, as booleans ``(B, H, W)``.

    Args:
        boxes: For each sample a box ``(x0, y0, x1, y1)`` in pixels, or a list of them. Coordinates are those of edges,
            so that ``(0, 0, W, H)`` is the whole image and ``(0, 0, 1, 1)`` its first pixel.
        size: Height and width.

    Raises:
        RelpropError: If a box is no such four numbers.
    """
    height, width = size
    y, x = torch.arange(height)[:, None] + 0.5, torch.arange(width) + 0.5
    masks = torch.zeros(len(boxes), height, width, dtype=torch.bool)
    for i, several in enumerate(boxes):
        corners = torch.as_tensor(several, dtype=torch.float64)
        if corners.numel() and (corners.shape[-1:] != (4,) or not corners.isfinite().all()):
            raise RelpropError(f"A box is four numbers (x0, y0, x1, y1), not {several!r}.")
        for x0, y0, x1, y1 in corners.reshape(-1, 4).tolist():
            if x1 < x0 or y1 < y0:
                raise RelpropError(f"The box {(x0, y0, x1, y1)} ends before it begins; its order is (x0, y0, x1, y1).")
            masks[i] |= (y >= y0) & (y < y1) & (x >= x0) & (x < x1)
    return masks


def pointing_game(maps: Tensor, regions: Tensor, tolerance: float = 15.0) -> Tensor:
    """Whether the highest value lies on the object, or near it.

    Zhang et al. (2018), *Top-Down Neural Attention by Excitation Backprop*; their tolerance is 15 pixels, as the crow
    flies. Where several pixels share the maximum, the result is the fraction of them that hit.

    Args:
        maps: Heatmaps; only their maxima matter.
        regions: Where the objects are.
        tolerance: How many pixels off still is a hit.

    Raises:
        RelpropError: If maps and regions do not fit, or the tolerance is negative.
    """
    heatmaps, regions = _checked(maps, regions)
    if not 0 <= tolerance < math.inf:
        raise RelpropError(f"The tolerance is {tolerance!r}; pass a number of pixels that is not negative.")
    highest = (heatmaps == heatmaps.amax((1, 2), keepdim=True)).double()
    return (highest * _grown(regions, tolerance)).sum((1, 2)) / highest.sum((1, 2))


def relevance_mass_accuracy(maps: Tensor, regions: Tensor) -> Tensor:
    """The part of the positive relevance that lies on the object; zero where there is none at all.

    Arras et al. (2022), *CLEVR-XAI: A benchmark dataset for the ground truth evaluation of neural network
    explanations*.

    Args:
        maps: Heatmaps; their positive part counts.
        regions: Where the objects are.

    Raises:
        RelpropError: If maps and regions do not fit.
    """
    heatmaps, regions = _checked(maps, regions)
    positive = heatmaps.clamp_min(0)
    total = positive.sum((1, 2))
    return (positive * regions).sum((1, 2)) / torch.where(total > 0, total, 1.0)


def energy_pointing_game(maps: Tensor, regions: Tensor) -> Tensor:
    """The part of the positive relevance that lies in the object's box.

    Wang et al. (2020), *Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks*. The formula
    is that of `relevance_mass_accuracy`; the name says that regions are boxes.

    Args:
        maps: Heatmaps; their positive part counts.
        regions: The boxes, as `box_masks` makes them.

    Raises:
        RelpropError: If maps and regions do not fit.
    """
    return relevance_mass_accuracy(maps, regions)


def relevance_rank_accuracy(maps: Tensor, regions: Tensor) -> Tensor:
    """The part of the K highest pixels that lie on the object, which has K.

    Arras et al. (2022), as `relevance_mass_accuracy`. Where a tie is cut, its pixels share the places that are left.

    Args:
        maps: Heatmaps; only their order matters.
        regions: Where the objects are.

    Raises:
        RelpropError: If maps and regions do not fit.
    """
    heatmaps, regions = _checked(maps, regions)
    values, inside = heatmaps.flatten(1), regions.flatten(1)
    places = inside.sum(1, keepdim=True)
    threshold = values.sort(1, descending=True).values.gather(1, places - 1)
    above, tied = values > threshold, values == threshold
    share = (places - above.sum(1, keepdim=True)) / tied.sum(1, keepdim=True).double()
    return ((above * inside).sum(1) + share[:, 0] * (tied * inside).sum(1)) / places[:, 0]


def effective_heat_ratio(maps: Tensor, regions: Tensor, floor: float = 0.1, quantiles: int = 11) -> Tensor:
    """Heat on the object a pixel that is hot, averaged over what counts as hot.

    Zhang et al. (2021), *Fine-Grained Neural Network Explanation by Identifying Input Features with Predictive
    Information*, after the authors' code: the positive part is scaled to a maximum of one, and values below the floor
    are nothing. For each quantile of the others, from 0 to 1, the heat on the object of the pixels that reach it (or
    0.99, for the last to be met) is divided by their number; the result is the area under these ratios.

    Args:
        maps: Heatmaps; their positive part counts.
        regions: Where the objects are.
        floor: Below this fraction of the maximum there is no heat.
        quantiles: The number of quantiles.

    Raises:
        RelpropError: If maps and regions do not fit, or the floor or the number of quantiles makes no sense.
    """
    heatmaps, regions = _checked(maps, regions)
    if not 0 < floor < 1 or quantiles < 2:
        raise RelpropError("The floor has to lie between 0 and 1, and there have to be at least 2 quantiles.")
    axis = torch.linspace(0, 1, quantiles, dtype=torch.float64, device=heatmaps.device)
    areas = heatmaps.new_zeros(len(heatmaps))
    for i, (heatmap, region) in enumerate(zip(heatmaps.clamp_min(0), regions, strict=True)):
        top = heatmap.max()
        if top <= 0:
            continue
        scaled = heatmap / top
        hot = scaled >= floor
        thresholds = torch.quantile(scaled[hot], axis).clamp_max(0.99)
        reached = (scaled >= thresholds[:, None, None]) & hot
        ratios = (scaled * (reached & region)).sum((1, 2)) / reached.sum((1, 2))
        areas[i] = torch.trapezoid(ratios, axis)
    return areas


def grid_images(x: Tensor, size: int = 3) -> Tensor:
    """Images side by side in squares, for `grid_pointing_game`.

    Args:
        x: Images ``(B, C, H, W)``, of classes that differ within each square; B is a multiple of ``size ** 2``.
        size: Images along a side.

    Returns:
        ``(B / size ** 2, C, size * H, size * W)``, filled row by row.

    Raises:
        RelpropError: If the images do not fill the squares.
    """
    if x.ndim != 4 or size < 1 or not len(x) or len(x) % size**2:
        raise RelpropError(
            f"Squares of {size}x{size} take (B, C, H, W) images in multiples of {size**2}, not {tuple(x.shape)}."
        )
    _, channels, height, width = x.shape
    cells = x.reshape(-1, size, size, channels, height, width)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, size * height, size * width)


def grid_pointing_game(maps: Tensor, cells: int | Sequence[int] | Tensor, size: int = 3) -> Tensor:
    """The part of the positive relevance for a class that lies in the one cell with an image of it.

    Boehle et al. (2021), *Convolutional Dynamic Alignment Networks for Interpretable Classifications*; a map that knows
    nothing gets ``1 / size ** 2``.

    Args:
        maps: Heatmaps of `grid_images`; their positive part counts.
        cells: The number of the explained class' cell, row by row from 0; one for all, or one a map.
        size: Images along a side.

    Raises:
        RelpropError: If the maps are no such squares, or there is no such cell.
    """
    maps = torch.as_tensor(maps)
    numbers = torch.as_tensor(cells, device=maps.device)
    height, width = maps.shape[-2:]
    if size < 1 or height % size or width % size:
        raise RelpropError(f"Maps of {height}x{width} are no squares of {size}x{size} images; pass another size.")
    if numbers.shape not in ((), maps.shape[:1]) or ((numbers < 0) | (numbers >= size**2)).any():
        raise RelpropError(
            f"The cells of a {size}x{size} square are 0 to {size**2 - 1}, one a map; not {numbers.tolist()}."
        )
    rows = torch.arange(height, device=maps.device)[:, None] // (height // size)
    columns = torch.arange(width, device=maps.device) // (width // size)
    return relevance_mass_accuracy(maps, (rows * size + columns) == numbers.expand(len(maps))[:, None, None])


def _checked(maps: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
    """Heatmaps in float64, and the regions."""
    regions = torch.as_tensor(regions)
    if regions.ndim != 3 or regions.dtype != torch.bool:
        raise RelpropError(
            f"The regions are {str(regions.dtype).removeprefix('torch.')} of shape {tuple(regions.shape)}; pass "
            "booleans (B, H, W), such as box_masks makes of boxes."
        )
    heatmaps = heat(maps, regions.shape).double()
    nowhere = ~regions.flatten(1).any(1)
    if nowhere.any():
        raise RelpropError(f"The region of sample {int(nowhere.nonzero()[0])} is empty; leave the sample out.")
    return heatmaps, regions.to(heatmaps.device)


def _grown(regions: Tensor, tolerance: float) -> Tensor:
    """The pixels that are no farther from a region than the tolerance."""
    reach = min(int(tolerance), max(regions.shape[1:]))
    offsets = torch.arange(-reach, reach + 1, device=regions.device)
    disc = (offsets[:, None] ** 2 + offsets**2 <= tolerance**2).float()
    near: Tensor = F.conv2d(regions[:, None].float(), disc[None, None], padding=reach)[:, 0] > 0.5
    return near
