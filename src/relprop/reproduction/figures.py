"""Figures: the paper's pictures, a grid of overlays, one row a photo and one column a method."""

# ruff: noqa: PLC0415 - matplotlib is imported where it paints

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from relprop import methods
from relprop.figure import glow, limit

FIGURES: Mapping[str, Mapping[str, str]] = {
    "qualitative": {
        "LRP": "captum-lrp",
        "Integrated\nGradients": "integrated-gradients",
        "Guided BP": "guided-backprop",
        "Grad-CAM": "grad-cam",
        "Score-CAM": "score-cam",
        "ours": "released+hq-released",
        "ours, raw": "paper",
    },
    "splitting": {"symmetric": "ii+hq-released", "ratio": "released+hq-released"},
    "quantization": {"raw": "released", "quantised": "released+hq-released"},
    "ablation": {
        "(i)": "i+hq-released",
        "(ii)": "ii+hq-released",
        "(iii)": "iii+hq-released",
        "(iv)": "iv+hq-released",
    },
}
"""By the figure's name: its columns and their methods."""

_INCHES, _HEAD = 2.2, 0.5


def draw(model: Any, photos: Sequence[Path], columns: Mapping[str, str], path: Path) -> None:
    """Explains the predicted class of each photo by each method, and paints it.

    Args:
        model: What ``relprop.load`` returns.
        photos: Image files.
        columns: From a label to the name of a method.
        path: The picture to write.
    """
    from matplotlib.figure import Figure

    x = torch.stack([model.prepare(photo) for photo in photos])
    with torch.no_grad():
        target = model.module(x).argmax(1)
    maps = {label: methods.get(name)(model, x, target).sum(1) for label, name in columns.items()}
    size = (_INCHES * (1 + len(columns)), _INCHES * len(photos) + _HEAD)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(photos), 1 + len(columns), squeeze=False)
    for i, photo in enumerate(photos):
        crop = model.crop(photo)
        pictures = [crop, *(glow(heat[i], crop, limit(heat[i])) for heat in maps.values())]
        for axes, picture in zip(grid[i], pictures, strict=True):
            axes.imshow(picture)
            axes.set(xticks=[], yticks=[])
        name = model.classes[int(target[i])] if model.classes else int(target[i])
        grid[i][0].set_ylabel(str(name), fontsize=9)
    for axes, label in zip(grid[0], ("photo", *columns), strict=True):
        axes.set_title(label, fontsize=10)
    figure.savefig(path, dpi=110)
