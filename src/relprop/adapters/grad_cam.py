"""Heatmaps from a callable like pytorch-grad-cam's: ``(B, H, W)`` arrays from 0 to 1, for its pictures and its metrics.

```python
from pytorch_grad_cam.utils.image import show_cam_on_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from relprop.adapters.grad_cam import LRP

with LRP(model=model) as cam:                                    # no target_layers: relevance of the pixels
    grayscale = cam(input_tensor=x, targets=[ClassifierOutputTarget(281)])
picture = show_cam_on_image(rgb, grayscale[0], use_rgb=True)     # rgb: (H, W, 3) from 0 to 1
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop import requests
from relprop.engine import explain
from relprop.errors import RelpropError

__all__ = ["LRP"]

_CLASSIFIERS = ("ClassifierOutputTarget", "ClassifierOutputSoftmaxTarget")


class LRP:
    """Relevance as pytorch-grad-cam gives its maps: positive parts only, each image scaled to 0..1.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        target_layers: Modules, or their names, whose outputs' relevance is drawn instead of the pixels', enlarged to
            the image; of several, the mean. None for the pixels.
        percentile: What becomes 1: relevance of pixels has a few outliers, beside which a map scaled by its maximum
            would be dark. 100 is the maximum itself, and keeps the order of all pixels.
        **options: Passed to :func:`relprop.explain`: ``preset``, ``split``, ``start``, ``overrides`` ...

    Attributes:
        outputs: The model's outputs for the last batch, as there.
    """

    def __init__(
        self,
        model: Any,
        target_layers: Sequence[nn.Module | str] | None = None,
        percentile: float = 99.5,
        **options: Any,
    ) -> None:
        if not 0 < percentile <= 100:
            raise RelpropError(f"The percentile is {percentile}; pass one above 0, up to 100.")
        self.model = model
        module = requests.module(model, halves=True)
        self.target_layers = [requests.name_of(layer, module) for layer in target_layers or ()]
        self.percentile = percentile
        self.options = options
        self.outputs: Tensor | None = None

    def __enter__(self) -> LRP:
        return self

    def __exit__(self, *_: object) -> None:
        """There are no hooks to release."""

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Sequence[Any] | None = None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> npt.NDArray[np.float32]:
        """The maps of a batch.

        Args:
            input_tensor: The images, ``(B, C, H, W)``.
            targets: One an image: a class, or pytorch-grad-cam's ``ClassifierOutputTarget``; None for the predicted
                ones.
            aug_smooth: Not offered: relevance needs no smoothing over flips.
            eigen_smooth: Not offered either; it is of feature maps.

        Returns:
            The maps, ``(B, H, W)``, from 0 to 1.

        Raises:
            RelpropError: If a target is of another kind, or the request cannot be met.
        """
        if aug_smooth or eigen_smooth:
            raise RelpropError("aug_smooth and eigen_smooth are not offered for relevance; leave them out.")
        classes = None if targets is None else [_category(target) for target in targets]
        layers = [name + requests.OUTPUT for name in self.target_layers]
        result = explain(self.model, input_tensor, classes, layers=layers, **self.options)
        self.outputs = result.output
        if not layers:
            return self._scaled(result.heatmap).float().cpu().numpy()
        size, maps = input_tensor.shape[2:], []
        for layer in layers:
            relevance = result.relevance_at(layer)
            if relevance.ndim != 4:
                there = f"{layer.removesuffix(requests.OUTPUT)!r} gives {tuple(relevance.shape)}"
                raise RelpropError(f"A map needs a layer of feature maps (B, K, h, w), and {there}; name another one.")
            small = self._scaled(relevance.sum(1))[:, None]
            maps.append(F.interpolate(small, size, mode="bilinear", align_corners=False)[:, 0])
        return self._scaled(torch.stack(maps).mean(0)).float().cpu().numpy()

    def _scaled(self, maps: Tensor) -> Tensor:
        positive = maps.clamp(min=0).double()
        values = positive.flatten(1)
        rank = max(1, round(values.shape[1] * self.percentile / 100))
        top = values.kthvalue(rank, 1).values  # torch.quantile refuses large images
        top = torch.where(top > 0, top, values.amax(1))
        top = torch.where(top > 0, top, 1.0)
        return (positive / top.reshape(-1, *[1] * (maps.ndim - 1))).clamp(max=1)


def _category(target: Any) -> int:
    """The class that one of pytorch-grad-cam's targets means."""
    named = any(kind.__name__ in _CLASSIFIERS for kind in type(target).__mro__)
    category = target.category if named else target
    if isinstance(category, bool) or not isinstance(category, int | np.integer):
        msg = f"The target {target!r} is no class; pass numbers, or pytorch-grad-cam's ClassifierOutputTarget."
        raise RelpropError(msg)
    return int(category)
