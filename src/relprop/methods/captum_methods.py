"""Gradients, DeepLIFT and conventional LRP, through captum (Kokhlikyan et al., 2020, arXiv:2009.07896).

captum hooks modules and, for LRP, rewrites their weights. It gets a twin of the model: for the hooks, one in which
every call has a module of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop.errors import RelpropError
from relprop.methods.method import Method, content_seeds, extra
from relprop.methods.unshared import check_twin, shadow, unshared
from relprop.quiet import quietly
from relprop.trace import trace

_TOGETHER = 32  # inputs that go through the model at once, where a method makes many of one


# -- gradients --


def _gradient(model: nn.Module, x: Tensor, target: Tensor, *, times_input: bool) -> Tensor:
    kind = extra("captum.attr").InputXGradient if times_input else extra("captum.attr").Saliency
    with quietly():  # captum remarks on the hooks that it sets and takes away
        maps: Tensor = kind(shadow(model)).attribute(x.requires_grad_(), target=target)
    return maps


def _integrated(model: nn.Module, x: Tensor, target: Tensor, *, steps: int = 50, baseline: float = 0.0) -> Tensor:
    method = extra("captum.attr").IntegratedGradients(shadow(model))
    together = max(_TOGETHER, x.shape[0])
    with quietly():
        maps: Tensor = method.attribute(x, baseline, target=target, n_steps=steps, internal_batch_size=together)
    return maps


def _guided(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    twin = unshared(model)
    check_twin(model, twin, x)
    with quietly():
        maps: Tensor = extra("captum.attr").GuidedBackprop(twin).attribute(x.requires_grad_(), target=target)
    return maps


def _smooth(model: nn.Module, x: Tensor, target: Tensor, *, samples: int = 50, noise: float = 0.15) -> Tensor:
    attr, twin = extra("captum.attr"), shadow(model)

    def one(x: Tensor, target: Tensor) -> Tensor:
        tunnel = attr.NoiseTunnel(attr.Saliency(twin))
        spread = noise * float(x.max() - x.min())
        settings = {"nt_samples": samples, "nt_samples_batch_size": _TOGETHER, "stdevs": spread, "abs": False}
        maps: Tensor = tunnel.attribute(x.requires_grad_(), target=target, **settings)
        return maps.abs()

    return _each_seeded(one, x, target, "smoothgrad")


def _gradient_shap(model: nn.Module, x: Tensor, target: Tensor, *, samples: int = 50, baseline: float = 0.0) -> Tensor:
    attr, twin = extra("captum.attr"), shadow(model)

    def one(x: Tensor, target: Tensor) -> Tensor:
        method, zero = attr.GradientShap(twin), torch.full_like(x, baseline)
        parts = [min(_TOGETHER, samples - done) for done in range(0, samples, _TOGETHER)]
        maps = [method.attribute(x.requires_grad_(), zero, n_samples=n, target=target) * n / samples for n in parts]
        return torch.stack(maps).sum(0)

    return _each_seeded(one, x, target, "gradient-shap")


# -- DeepLIFT --


class Windows(nn.Module):
    """A max pool whose windows are laid side by side before their maxima are taken.

    captum's DeepLIFT writes the multipliers of a max pool back to the winners, and where windows overlap a later one
    overwrites an earlier one's; side by side they cannot.
    """

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        if pool.dilation not in (1, (1, 1)) or pool.return_indices:
            raise RelpropError(f"DeepLIFT knows max pools without dilation and indices, not {pool}.")
        self.pool = [_pair(v) for v in (pool.kernel_size, pool.stride, pool.padding)]
        self.ceil = pool.ceil_mode
        self.largest = nn.MaxPool1d(self.pool[0][0] * self.pool[0][1])

    def forward(self, x: Tensor) -> Tensor:
        """The pool's output."""
        margins: list[int] = []
        for n, kernel, stride, pad in zip(x.shape[2:], *self.pool, strict=True):
            steps = (n + 2 * pad - kernel + (stride - 1 if self.ceil else 0)) // stride
            steps -= steps * stride >= n + pad  # as torch has it: a window starts inside the image
            margins = [pad, steps * stride + kernel - n - pad, *margins]
        (height, width), strides, _ = self.pool
        # Finite, for the difference of the two inputs' paddings has to be zero.
        padded = F.pad(x, margins, value=torch.finfo(x.dtype).min)
        windows = padded.unfold(2, height, strides[0]).unfold(3, width, strides[1])
        rows: Tensor = self.largest(windows.reshape(x.shape[0], -1, height * width))
        return rows.reshape(windows.shape[:4])


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _deeplift(model: nn.Module, x: Tensor, target: Tensor, *, baseline: float = 0.0) -> Tensor:
    twin = unshared(model, pools=Windows)
    check_twin(model, twin, x)
    zero = torch.full_like(x, baseline)
    with quietly():
        maps: Tensor = extra("captum.attr").DeepLift(twin).attribute(x.requires_grad_(), zero, target=target)
    with torch.no_grad():
        both = [twin(batch).gather(1, target[:, None])[:, 0] for batch in (x, zero[:1].expand_as(x))]
    difference, missing = both[0] - both[1], both[0] - both[1] - maps.detach().sum((1, 2, 3))
    # What rounding may do in float32; an operation without a rule does far more.
    allowed = 1e-2 * difference.abs() + 1e-4 * maps.detach().abs().sum((1, 2, 3)) + 1e-5 * both[0].abs()
    if (missing.abs() > allowed).any():
        raise RelpropError(
            f"captum's DeepLIFT does not add up for {type(model).__name__} (it misses {float(missing.abs().max()):.2g} "
            f"of {float(difference.abs().max()):.2g}): the model has operations that it takes for linear."
        )
    return maps


# -- conventional LRP --


def _lrp(model: nn.Module, x: Tensor, target: Tensor, *, mixture: bool, sums: bool) -> Tensor:
    attr = extra("captum.attr")
    addition = extra("captum.attr._utils.custom_modules").Addition_Module
    twin = unshared(model, sums=addition if sums else None, own_weights=True)
    check_twin(model, twin, x)
    if mixture:
        rule = extra("captum.attr._utils.lrp_rules").Alpha1_Beta0_Rule
        for name in _lower_half(model):
            twin.get_submodule(name).rule = rule()
    try:
        with quietly():
            maps: Tensor = attr.LRP(twin).attribute(x.requires_grad_(), target=target)
    except TypeError as error:  # captum's way to say that a module has no rule
        reason = str(error).partition(" has no rule")[0]
        raise RelpropError(f"captum's LRP has no rule for {reason.removeprefix('Module of type ')}.") from error
    return maps


def _lower_half(model: nn.Module) -> list[str]:
    """The convolutions and matrices before the middle of the residual blocks (after the 8th of ResNet-50's 16)."""
    graph = trace(model)
    weighted = [n for n in graph if n.kinds and n.kinds[-1] in (nn.Conv2d, nn.Linear)]
    lower = [n for n in weighted if 2 * n.after < graph.merges] if graph.merges else weighted[: len(weighted) // 2]
    return [n.name.replace("#", "_") for n in lower]


# -- captum's ways --

_SEEDING = threading.Lock()
"""captum draws from torch's and numpy's global generators, so one of its methods draws at a time."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Global generators that start from a seed, and are afterwards as they were."""
    with _SEEDING, torch.random.fork_rng(devices=[]), quietly():
        before = np.random.get_state()  # noqa: NPY002 - it is numpy's global generator that captum draws from
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002


def _each_seeded(one: Any, x: Tensor, target: Tensor, salt: str) -> Tensor:
    """Each sample for itself, with a seed of its own, so that it does not matter who else is in the batch."""
    maps = []
    for i, seed in enumerate(content_seeds(x, salt)):
        with seeded(seed):
            maps.append(one(x[i : i + 1].detach(), target[i : i + 1]))
    return torch.cat(maps)


_DELTA = "sums to f(x) - f(baseline), the logits"
METHODS = (
    Method(
        "captum-lrp",
        "captum",
        "none: relevance is copied into both branches of a sum, which captum does not see",
        3,
        "Bach et al., 2015, PLOS ONE 10(7); epsilon rule, captum's implementation on the network as it is",
        partial(_lrp, mixture=False, sums=False),
    ),
    Method(
        "captum-lrp-mixture",
        "captum",
        "none, as captum-lrp",
        3,
        "Bach et al., 2015; alpha1-beta0 in the lower half of the blocks, epsilon above: Otsuki et al., 2024, appendix",
        partial(_lrp, mixture=True, sums=False),
    ),
    Method(
        "captum-lrp-sums",
        "captum",
        "sums to the logit but for what biases and cancelling sums take",
        3,
        "Bach et al., 2015; epsilon rule, with the sums as modules that captum sees",
        partial(_lrp, mixture=False, sums=True),
    ),
    Method(
        "integrated-gradients",
        "captum",
        f"{_DELTA}, but for the error of the steps",
        100,
        "Sundararajan et al., 2017, Axiomatic Attribution for Deep Networks, ICML",
        _integrated,
    ),
    Method(
        "guided-backprop",
        "captum",
        "none",
        2,
        "Springenberg et al., 2015, Striving for Simplicity: The All Convolutional Net, ICLR workshop",
        _guided,
    ),
    Method(
        "deeplift",
        "captum",
        _DELTA,
        4,
        "Shrikumar et al., 2017, Learning Important Features Through Propagating Activation Differences, ICML",
        _deeplift,
    ),
    Method(
        "gradient-x-input",
        "captum",
        "sums to the logit in nets of ReLUs without biases",
        2,
        "Shrikumar et al., 2016, Not Just a Black Box, arXiv:1605.01713",
        partial(_gradient, times_input=True),
    ),
    Method(
        "saliency",
        "captum",
        "none: absolute gradients",
        2,
        "Simonyan et al., 2014, Deep Inside Convolutional Networks, ICLR workshop",
        partial(_gradient, times_input=False),
    ),
    Method(
        "smoothgrad",
        "captum",
        "none: the absolute mean of gradients under noise",
        100,
        "Smilkov et al., 2017, SmoothGrad: removing noise by adding noise, arXiv:1706.03825",
        _smooth,
    ),
    Method(
        "gradient-shap",
        "captum",
        f"{_DELTA}, in expectation over the random steps",
        100,
        "Lundberg and Lee, 2017, A Unified Approach to Interpreting Model Predictions, NeurIPS",
        _gradient_shap,
    ),
)
