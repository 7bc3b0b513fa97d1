"""ROAD: remove pixels so that their absence cannot be seen, and watch the class."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from relprop import requests
from relprop.compat import import_torchvision
from relprop.errors import RelpropError
from relprop.metrics.ranking import Ranking, Reduction, heat, numbered, seed_of
from relprop.metrics.scorer import Probabilities, classes, fastest, probabilities
from relprop.quiet import quietly

__all__ = ["road"]

PERCENTILES = (10, 20, 30, 40, 50, 60, 70, 80, 90)


def road(
    model: Any,
    x: Tensor,
    maps: Tensor,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    percentiles: Sequence[int] = PERCENTILES,
    reduce: Reduction = "sum",
    seed: int = 0,
    indices: Sequence[int] | None = None,
    scorer: Probabilities | None = None,
) -> Tensor:
    """Remove and debias: by how much a class falls more when the highest pixels go than when the lowest do.

    Rong et al. (2022), *A Consistent and Efficient Evaluation Strategy for Attribution Methods*: removed pixels become
    noisy linear interpolations of their neighbours, so that the shape of the hole tells the model nothing. Computed by
    pytorch-grad-cam: (LeRF - MoRF) / 2, the mean over the percentiles; higher is better, and 0 is what chance gets. It
    is given ranks in place of values, ties broken at random, for it would remove tied pixels all at once.

    Args:
        model: A module in evaluation mode that returns logits, or what ``relprop.load`` returns.
        x: Normalised images, ``(B, C, H, W)``.
        maps: Heatmaps, ``(B, H, W)``, or with channels.
        target: The class to watch: None for the predicted one, a number for all, or one a sample.
        percentiles: Where to cut; at p, the pixels above the p-th percentile are removed.
        reduce: What becomes of the maps' channels, as for ``insertion_deletion``.
        seed: Of the order of tied pixels, and of the noise.
        indices: A number for each sample, which together with the seed decides both; 0, 1, ... unless told.
        scorer: Computes the probabilities in place of the model.

    Returns:
        ``(B,)``, in float64.

    Raises:
        RelpropError: If pytorch-grad-cam is not installed, or the request cannot be met.
    """
    combined = _combined()
    module = requests.module(model)
    requests.check_input(x, module)
    if x.ndim != 4:
        raise RelpropError(f"ROAD imputes images (B, C, H, W), not an input of shape {tuple(x.shape)}.")
    if not percentiles or not all(0 < p < 100 for p in percentiles):
        raise RelpropError(f"The percentiles {list(percentiles)} have to lie between 0 and 100.")
    score = scorer or fastest(module, x, forwards=4 * len(percentiles) * len(x))
    values = heat(maps, (len(x), *x.shape[2:]), reduce)
    numbers = numbered(indices, len(x))
    ranking = Ranking(values.flatten(1), "random", (seed,), numbers)
    chosen = classes(target, probabilities(score, x.detach())).tolist()
    measure = combined(list(percentiles))
    result = []
    # It hands tensors to numpy in a way that newer versions of numpy remark on, once for every mask.
    with torch.random.fork_rng(devices=[]), quietly():
        for image, number in enumerate(numbers):
            torch.manual_seed(seed_of(seed, number))
            last = ranking.positions(image, 0).reshape(values.shape[1:]).double() / max(1, ranking.size - 1)
            result += measure(
                x[image, None].detach().float(),  # the imputer computes in float32
                [(1 - last).cpu().numpy()],
                [itemgetter(chosen[image])],
                lambda images: probabilities(score, images.to(x.dtype)),
            ).tolist()
    return torch.tensor(result, dtype=torch.float64)


def _combined() -> Any:
    """pytorch-grad-cam's ROAD, imported when it is asked for: it is an extra."""
    try:
        import_torchvision()  # it imports torchvision itself
        return importlib.import_module("pytorch_grad_cam.metrics.road").ROADCombined
    except ImportError:
        raise RelpropError("ROAD is computed by pytorch-grad-cam, which is not here: pip install grad-cam.") from None
