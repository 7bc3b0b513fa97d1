"""LRP through zennit (Anders et al., 2021, arXiv:2106.13200), as its users run it on torchvision's ResNets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop.methods.method import Method, extra
from relprop.methods.unshared import shadow
from relprop.quiet import quietly


def _epsilon_plus_flat(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    composites, canonizers = extra("zennit.composites"), extra("zennit.torchvision")
    # zennit merges batch norms into the weights before them, so the twin has weights of its own.
    twin = shadow(model, own_weights=True)
    composite = composites.EpsilonPlusFlat(canonizers=[canonizers.ResNetCanonizer()])
    with quietly(), composite.context(twin) as hooked:
        output = hooked(x.requires_grad_())
        start = F.one_hot(target, output.shape[1]).to(output)
        (relevance,) = torch.autograd.grad(output, x, start)
    return relevance


METHODS = (
    Method(
        "zennit-epsilon-plus-flat",
        "zennit",
        "sums to one but for what epsilon, biases and cancelling sums take; sums outside torchvision's blocks copy",
        5,
        "Anders et al., 2021, Software for Dataset-wide XAI, arXiv:2106.13200",
        _epsilon_plus_flat,
    ),
)
