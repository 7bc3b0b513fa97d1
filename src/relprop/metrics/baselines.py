"""Baselines: what stands in the place of a pixel that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relprop.errors import RelpropError

__all__ = ["BASELINES", "baseline_of"]

BASELINES = ("black", "mean", "blur")
KERNEL, SIGMA = 11, 5.0
"""Size and width of the blur, those of Petsiuk et al. (2018), *RISE*."""


def baseline_of(kind: Any, x: Tensor, normalization: Any = None) -> Tensor:
    """The input without anything in it: ``(1, ...)`` where it is the same for all samples, else like the input.

    Args:
        kind: ``"black"``, a black pixel as the normalisation makes it; ``"mean"``, the normalisation's mean pixel,
            which is zero once it is normalised; ``"blur"``, the input behind a Gaussian of RISE's size and width
            (the border repeats itself outwards, so that no frame appears); or a tensor that broadcasts to the input.
        x: The normalised input.
        normalization: Mean and standard deviation of the channels; needed to know what black and the mean are.

    Raises:
        RelpropError: If the baseline is unknown or does not fit, or the normalisation is needed and not there.
    """
    if isinstance(kind, str):
        if kind not in BASELINES:
            names = ", ".join(map(repr, BASELINES))
            raise RelpropError(f"The baseline {kind!r} is unknown; pass {names}, or a tensor.")
        if kind == "blur":
            return _blurred(x)
        mean, std = _normalization(normalization, kind, x)
        pixel = -mean / std if kind == "black" else torch.zeros_like(mean)
        return pixel.reshape(1, -1, *[1] * (x.ndim - 2)).to(x).expand(1, *x.shape[1:])
    return _given(kind, x)


def _given(kind: Any, x: Tensor) -> Tensor:
    """A tensor of the caller's, spread over the input."""
    try:
        baseline = torch.as_tensor(kind, dtype=x.dtype, device=x.device).detach()
        each = baseline.ndim == x.ndim and len(baseline) == len(x)
        baseline = baseline.expand(len(x) if each else 1, *x.shape[1:])
    except (TypeError, ValueError, RuntimeError):
        what = f"of shape {tuple(kind.shape)}" if isinstance(kind, Tensor) else f"a {type(kind).__name__}"
        raise RelpropError(
            f"The baseline is {what}; pass a name, or a tensor that broadcasts to {tuple(x.shape)}."
        ) from None
    if not torch.isfinite(baseline).all():
        raise RelpropError("The baseline has NaN or infinite values; clean it.")
    return baseline


def _normalization(normalization: Any, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    if normalization is None:
        raise RelpropError(
            f"What {kind!r} is depends on how the input was normalised; pass normalization=(mean, std), a model from "
            "relprop.load, or the baseline as a tensor."
        )
    channels = x.shape[1] if x.ndim > 2 else 1
    try:
        mean, std = (torch.as_tensor(values, dtype=torch.float64).flatten() for values in normalization)
        fits = len(mean) in (1, channels) and len(std) in (1, channels) and bool((std > 0).all())
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise RelpropError(
            f"The normalisation has to be a pair (mean, std) of {channels} numbers each, the latter positive, one for "
            "each channel of the input."
        )
    return mean.expand(channels), std.expand(channels)


def _blurred(x: Tensor) -> Tensor:
    if x.ndim != 4:
        raise RelpropError(f"Only images (B, C, H, W) can be blurred, not an input of shape {tuple(x.shape)}.")
    offsets = torch.arange(KERNEL, dtype=x.dtype, device=x.device) - KERNEL // 2
    kernel = torch.softmax(-(offsets**2) / (2 * SIGMA**2), 0)
    planes = F.pad(x.detach().flatten(0, 1)[:, None], [KERNEL // 2] * 4, mode="replicate")
    planes = F.conv2d(F.conv2d(planes, _window(kernel, (1, -1))), _window(kernel, (-1, 1)))
    return planes.reshape(x.shape)


def _window(kernel: Tensor, shape: Sequence[int]) -> Tensor:
    return kernel.reshape(1, 1, *shape)
