"""Controls: maps that know nothing of the model, which every method has to beat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relprop.methods.method import Method, content_seeds


def _random(_: nn.Module, x: Tensor, __: Tensor, *, seed: int = 0) -> Tensor:
    """Uniform noise, the same for an image in any batch and any run."""
    maps = []
    for content in content_seeds(x, f"random {seed}"):
        generator = torch.Generator().manual_seed(content)
        maps.append(torch.rand(1, *x.shape[2:], generator=generator, dtype=x.dtype))
    return torch.stack(maps).to(x.device)


def _centre(_: nn.Module, x: Tensor, __: Tensor, *, width: float = 0.25) -> Tensor:
    """A Gaussian around the centre, its deviation a part of each side."""
    sides = [torch.arange(n, dtype=x.dtype, device=x.device) for n in x.shape[2:]]
    rows, columns = (torch.exp(-((i - (len(i) - 1) / 2) ** 2) / (2 * (width * len(i)) ** 2)) for i in sides)
    return (rows[:, None] * columns).expand(x.shape[0], 1, -1, -1).clone()


METHODS = (
    Method("random", "control", "none: uniform noise", 0, "a control", _random, spatial=True),
    Method("centre", "control", "none: a centred Gaussian", 0, "a control", _centre, spatial=True),
)
