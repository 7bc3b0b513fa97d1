"""Sanity: what can be asked of an explanation without knowing where the object is.

A method is a function ``(model, x, target) -> attributions`` like x; where maps are compared, channels are summed.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import count
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop import requests
from relprop.errors import RelpropError
from relprop.metrics.ranking import heat, numbered, seed_of
from relprop.metrics.scorer import classes
from relprop.state import undisturbed

__all__ = [
    "Method",
    "class_sensitivity",
    "conservation_error",
    "max_sensitivity",
    "parameter_randomisation",
    "similarity",
    "sparseness",
]

Method: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From a model, inputs and one target a sample to attributions like the inputs."""

WINDOW = 7
_TOGETHER = 5  # neighbours of an image that are explained at once


def sparseness(maps: Tensor) -> Tensor:
    """The Gini index of the absolute values of each map: 0 where all are the same, near 1 where few are not zero.

    Chalasani et al. (2020), *Concise Explanations of Neural Networks using Adversarial Training*. A map of zeros has
    the index 0.

    Args:
        maps: Heatmaps, ``(B, ...)``; channels are not summed, so reduce them first if they should be.

    Returns:
        ``(B,)``, in float64.

    Raises:
        RelpropError: If the maps are not finite.
    """
    size = _rows(maps).abs().sort(1).values
    number = size.shape[1]
    rank = torch.arange(1, number + 1, dtype=size.dtype, device=size.device)
    total = size.sum(1)
    return ((2 * rank - number - 1) * size).sum(1) / (number * torch.where(total > 0, total, 1.0))


def conservation_error(attributions: Tensor, start: Tensor) -> Tensor:
    """How far the sum of attributions is from what it should be, relative to it.

    For LRP that is the relevance it started with, for the likes of Integrated Gradients the difference of the model's
    outputs. What an explanation's ledger calls its error leaves out what rules absorb by design; this does not.

    Args:
        attributions: ``(B, ...)``.
        start: What they should add up to, ``(B,)``.

    Returns:
        ``(B,)``, in float64; where the start is zero, the sum itself.

    Raises:
        RelpropError: If the shapes do not fit, or something is not finite.
    """
    sums, start = _rows(attributions).sum(1), torch.as_tensor(start).detach().double()
    if start.shape != sums.shape or not start.isfinite().all():
        raise RelpropError(f"The start has shape {tuple(start.shape)}; pass one finite number for each of {len(sums)}.")
    return (sums - start).abs() / torch.where(start == 0, 1.0, start.abs())


def similarity(first: Tensor, second: Tensor, kind: str = "spearman") -> Tensor:
    """How alike two batches of heatmaps are.

    Args:
        first: ``(B, H, W)``.
        second: The same.
        kind: ``"spearman"``, the correlation of ranks, tied values sharing theirs; ``"pearson"``; ``"cosine"``; or
            ``"ssim"``, the structural similarity of Wang et al. (2004), in windows of 7x7, of maps scaled to 0..1.

    Returns:
        ``(B,)``, in float64: 1 for maps that are the same, and 0 where one that has no variation makes it undefined.

    Raises:
        RelpropError: If the shapes do not fit, or the kind is unknown.
    """
    if first.shape != second.shape:
        raise RelpropError(f"Maps of shapes {tuple(first.shape)} and {tuple(second.shape)} cannot be compared.")
    if kind == "ssim":
        return _ssim(_rows(first).reshape(first.shape), _rows(second).reshape(second.shape))
    a, b = _rows(first), _rows(second)
    if kind == "spearman":
        a, b = _ranks(a), _ranks(b)
    elif kind not in ("pearson", "cosine"):
        raise RelpropError(f"The similarity {kind!r} is unknown; pass 'spearman', 'pearson', 'cosine' or 'ssim'.")
    if kind != "cosine":
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    norm = a.norm(dim=1) * b.norm(dim=1)
    return (a * b).sum(1) / torch.where(norm > 0, norm, 1.0)


def class_sensitivity(
    method: Method, model: Any, x: Tensor, kind: str = "spearman", *, predicted: Tensor | None = None
) -> Tensor:
    """How alike a method's maps are for the predicted and for the least likely class; lower is better.

    A method that shows the same for every class explains the image and not the decision. After Sixt et al. (2020),
    *When Explanations Lie: Why Many Modified BP Attributions Fail*.

    Args:
        method: From model, inputs and targets to attributions.
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        x: A batch of inputs.
        kind: The `similarity`.
        predicted: The method's maps for the predicted class, where they are at hand.

    Returns:
        ``(B,)``, in float64.

    Raises:
        RelpropError: If the model, the input or the maps cannot be used.
    """
    module = _prepared(model, x)
    output = output_of(module, x)
    maps = method(module, x, output.argmax(1)) if predicted is None else predicted
    return similarity(_heatmaps(maps, x), _heatmaps(method(module, x, output.argmin(1)), x), kind)


def max_sensitivity(
    method: Method,
    model: Any,
    x: Tensor,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    radius: float = 0.02,
    samples: int = 10,
    seed: int = 0,
    indices: Sequence[int] | None = None,
) -> Tensor:
    """How much a map changes, at most, when the input hardly does; lower is better.

    Yeh et al. (2019), *On the (In)fidelity and Sensitivity of Explanations*: the largest norm of the difference, among
    inputs drawn uniformly around the given one, over the norm of the map. Computed by captum.

    Args:
        method: From model, inputs and targets to attributions.
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        x: A batch of inputs.
        target: The class to explain, as for ``relprop.explain``; by default that predicted for x, for all neighbours.
        radius: How far a value of the input may move, in units of the (normalised) input.
        samples: How many neighbours are drawn.
        seed: Of the neighbours.
        indices: A number for each sample, which together with the seed decides its neighbours; 0, 1, ... unless told.

    Returns:
        ``(B,)``, in float64.

    Raises:
        RelpropError: If captum is not installed, or the model, the input or the maps cannot be used.
    """
    try:
        captum = importlib.import_module("captum.metrics")
    except ImportError:
        raise RelpropError("Max-sensitivity is computed by captum, which is not here: pip install captum.") from None
    module = _prepared(model, x)
    targets, numbers = classes(target, output_of(module, x)), numbered(indices, len(x))
    if samples < 1 or not radius > 0:
        raise RelpropError(f"There have to be samples and a positive radius, not {samples!r} and {radius!r}.")

    def explained(inputs: Tensor | tuple[Tensor, ...], target: int) -> tuple[Tensor, ...]:
        only = inputs[0] if isinstance(inputs, tuple) else inputs
        # captum turns gradients off around the method, which may need them, and leaves a single target as it is.
        with torch.enable_grad():
            each = torch.tensor(target, device=x.device).expand(len(only))
            # In float64, for the squares of a norm may be out of float32's range where the values are not.
            return (method(module, only.to(x.dtype), each).detach().double().contiguous(),)

    result = []
    with torch.random.fork_rng(devices=[]):
        for image, chosen, number in zip(x.detach().split(1), targets.tolist(), numbers, strict=True):
            torch.manual_seed(seed_of(seed, number))
            sensitivity = captum.sensitivity_max(
                explained,
                image,
                perturb_radius=radius,
                n_perturb_samples=samples,
                max_examples_per_batch=min(samples, _TOGETHER),
                target=chosen,
            )
            result.append(sensitivity.detach().double())
    return torch.cat(result)


def parameter_randomisation(
    method: Method,
    model: Any,
    x: Tensor,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    layers: Sequence[str] | None = None,
    steps: int | None = None,
    kind: str = "spearman",
    seed: int = 0,
) -> dict[str, Tensor]:
    """How alike maps stay while the model's layers are randomised one after another, from the output down.

    Adebayo et al. (2018), *Sanity Checks for Saliency Maps*, the cascading test. A method that explains the model
    changes with it, so similarities should fall. The model itself is not touched: a copy is randomised.

    Args:
        method: From model, inputs and targets to attributions.
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        x: A batch of inputs.
        target: The class to explain, as for ``relprop.explain``; by default that which the whole model predicts.
        layers: Names of modules, each randomised with all that is in it, in the order in which they are called; by
            default every module that has parameters of its own.
        steps: How often to look, spread evenly from the first layer to the last; by default after each of them. All are
            randomised either way, and every look costs an explanation.
        kind: The `similarity` to the maps of the whole model.
        seed: Of the random parameters.

    Returns:
        For each layer, from the output down: the similarity when it and all above it are random, ``(B,)``.

    Raises:
        RelpropError: If there is no such layer, or the model, the input or the maps cannot be used.
    """
    module = _prepared(model, x)
    targets = classes(target, output_of(module, x))
    original = _heatmaps(method(module, x, targets), x)
    copy = deepcopy(module)
    modules = dict(copy.named_modules())
    own = [name for name, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    unknown = [name for name in layers or () if name not in modules]
    if unknown:
        raise RelpropError(f"There is no module {unknown[0]!r} to randomise; model.named_modules() lists them.")
    if steps is not None and steps < 1:
        raise RelpropError(f"steps is {steps!r}; the cascade has to be looked at once at least.")
    order = _called(copy, x)
    chosen = sorted(own if layers is None else layers, key=lambda name: order.get(name, -1), reverse=True)
    looks = set(range(len(chosen))) if steps is None else _spread(len(chosen), steps)
    result = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for place, name in enumerate(chosen):
            inside = (m for path, m in modules[name].named_modules(prefix=name) if layers is not None or path == name)
            for part in inside:
                _randomise(part)
            if place in looks:
                with torch.enable_grad():
                    result[name] = similarity(original, _heatmaps(method(copy, x, targets), x), kind)
                gc.collect()  # what was known of the copy as it was: its plans hold weights, and hold on to each other
    return result


def _spread(count: int, steps: int) -> set[int]:
    """So many of the numbers below a count, from the first to the last; one alone is the last."""
    return {round(i * (count - 1) / (steps - 1)) for i in range(steps)} if steps > 1 else {count - 1}


def _called(module: nn.Module, x: Tensor) -> dict[str, int]:
    """When each module of a copy was called last."""
    order: dict[str, int] = {}
    ticks = count()
    hooks = [
        part.register_forward_hook(lambda *_, name=name: order.update({name: next(ticks)}))
        for name, part in module.named_modules()
    ]
    output_of(module, x[:1])
    for hook in hooks:
        hook.remove()
    return order


def _randomise(module: nn.Module) -> None:
    """New parameters, as the module makes them; shuffled ones where it does not say how."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
        return
    for parameter in module.parameters(recurse=False):
        parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].reshape(parameter.shape))


def _prepared(model: Any, x: Tensor) -> nn.Module:
    module = requests.module(model)
    requests.check_input(x, module)
    return module


def output_of(module: nn.Module, x: Tensor) -> Tensor:
    """What a model makes of inputs, which leaves nothing on it."""
    with torch.no_grad(), undisturbed(module):
        output: Tensor = module(x.detach())
    return output


def _heatmaps(maps: Tensor, x: Tensor) -> Tensor:
    return heat(maps, (len(x), *(x.shape[2:] or x.shape[1:])))


def _rows(maps: Tensor) -> Tensor:
    """Maps in float64, one a row."""
    maps = torch.as_tensor(maps).detach()
    if maps.ndim < 2 or not maps.numel() or not maps.isfinite().all():
        raise RelpropError(f"Maps have to be finite numbers, one map a sample; these are {tuple(maps.shape)}.")
    return maps.double().flatten(1)


def _ranks(rows: Tensor) -> Tensor:
    """The rank of each value in its row; tied values share the mean of theirs."""
    ascending = rows.sort(1).values
    first, last = (torch.searchsorted(ascending, rows, right=right) for right in (False, True))
    return (first + last - 1).double() / 2


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity, the mean over all windows that fit."""
    if a.ndim != 3 or min(a.shape[1:]) < WINDOW:
        raise RelpropError(f"Structural similarity takes maps (B, H, W) of at least {WINDOW}x{WINDOW}.")
    a, b = _scaled(a), _scaled(b)
    mean_a, mean_b, square_a, square_b, product = (
        F.avg_pool2d(values[:, None], WINDOW, 1) for values in (a, b, a * a, b * b, a * b)
    )
    unbiased = WINDOW**2 / (WINDOW**2 - 1)
    var_a, var_b = unbiased * (square_a - mean_a**2), unbiased * (square_b - mean_b**2)
    covariance = unbiased * (product - mean_a * mean_b)
    c1, c2 = 0.01**2, 0.03**2
    index = (2 * mean_a * mean_b + c1) * (2 * covariance + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return index.mean((1, 2, 3))


def _scaled(maps: Tensor) -> Tensor:
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / torch.where(high > low, high - low, 1.0)
