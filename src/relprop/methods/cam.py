"""Class activation maps: Grad-CAM and its kin, Score-CAM and FullGrad.

Each is a few lines over the feature maps of one layer and their gradients, so they are written out here: the usual
library calls ``zero_grad`` on the user's model, leaves gradients in its parameters and cannot explain a frozen one.
All maps are what the papers define, before any rescaling for display, enlarged bilinearly to the image.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop.errors import RelpropError
from relprop.methods.method import Method, Progress, quiet
from relprop.methods.unshared import check_twin, shadow, unshared

Weighing: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From feature maps and their gradients to the weights of the maps; all ``(B, K, h, w)``, or ``(B, K, 1, 1)``."""

_TOLERANCE = 1e-3  # of FullGrad's law in float32


# -- from the gradients at one layer --


def _grad_cam(_: Tensor, gradients: Tensor) -> Tensor:
    """The mean gradient of each map (Selvaraju et al., 2017, eq. 1)."""
    return gradients.mean((2, 3), keepdim=True)


def _grad_cam_pp(maps: Tensor, gradients: Tensor) -> Tensor:
    """The positive gradients' sum, each weighed by how much it alone would do (Chattopadhay et al., 2018, eq. 19)."""
    square = gradients.square()
    below = 2 * square + maps.sum((2, 3), keepdim=True) * square * gradients
    alpha = torch.where(below != 0, square / torch.where(below != 0, below, 1.0), 0.0)
    return (alpha * gradients.relu()).sum((2, 3), keepdim=True)


def _layer_cam(_: Tensor, gradients: Tensor) -> Tensor:
    """Each place's own positive gradient (Jiang et al., 2021)."""
    return gradients.relu()


def _from_gradients(
    model: nn.Module, x: Tensor, target: Tensor, *, weigh: Weighing, layer: str | None = None
) -> Tensor:
    twin = shadow(model)
    maps, output = _features(twin, x, layer or last_stage(twin, x), gradients=True)
    (gradients,) = torch.autograd.grad(_scores(output, target).sum(), maps)
    weighed = (weigh(maps.detach(), gradients) * maps.detach()).sum(1, keepdim=True)
    return _enlarged(weighed.relu(), x)


# -- Score-CAM --


def _score_cam(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    layer: str | None = None,
    weights: str = "probability",
    together: int = 32,
    scorer: Callable[[Tensor], Tensor] | None = None,
    progress: Progress = quiet,
) -> Tensor:
    """Weighs every feature map by the class's score for the image seen through it (Wang et al., 2020).

    A map is enlarged and scaled to 0..1 to be the mask. Maps that differ by a factor only are one mask and are scored
    once; that is exact, and on a ResNet saves the many maps that are dead or alive at a single place.

    Args:
        model: The model.
        x: The images.
        target: One class an image.
        layer: The module whose output is taken; by default the last one that knows places.
        weights: ``"probability"``, the class's probability, as in the authors' code; ``"softmax"``, the softmax over
            the maps of the class's logits, as in their Algorithm 1.
        together: How many masked images go through the model at once.
        scorer: A faster way from images to the model's probabilities, for ``"probability"``.
        progress: Told of the masked images that are scored.
    """
    if weights not in ("probability", "softmax"):
        raise RelpropError(f"Score-CAM's weights are 'probability' or 'softmax', not {weights!r}.")
    if weights == "softmax" and scorer is not None:
        raise RelpropError(
            "Score-CAM's weights 'softmax' are of logits, which a scorer of probabilities does not give."
        )
    twin = shadow(model)
    with torch.no_grad():
        features, _ = _features(twin, x, layer or last_stage(twin, x), gradients=False)
        # The smallest value of a mask is 0 and its largest 1, before it is enlarged and again thereafter.
        shapes = [_unit(sample.flatten(1)).unique(dim=0, return_inverse=True) for sample in features]
        total, done, cams = sum(len(distinct) for distinct, _ in shapes), 0, []
        for i, (distinct, which) in enumerate(shapes):
            scores = []
            for part in distinct.split(together):
                masks = _enlarged(part.reshape(-1, 1, *features.shape[2:]), x)
                masks = _unit(masks.flatten(1)).reshape(masks.shape)
                seen = masks * x[i]
                output = scorer(seen) if scorer else twin(seen) if weights == "softmax" else twin(seen).softmax(1)
                scores.append(_scores(output, target[i].expand(len(part))))
                done += len(part)
                progress(done, total)
            score = torch.cat(scores)[which]
            score = score.softmax(0) if weights == "softmax" else score
            alive = features[i].flatten(1).amax(1) > features[i].flatten(1).amin(1)
            cams.append((features[i] * (score * alive)[:, None, None]).sum(0, keepdim=True))
    return _enlarged(torch.stack(cams), x).relu()


def _unit(rows: Tensor) -> Tensor:
    """Each row scaled to 0..1; a constant one becomes 0."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    return (rows - low) / torch.where(high > low, high - low, 1.0)


# -- FullGrad --


def full_gradient(model: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The complete gradient decomposition of a ReLU net (Srinivas and Fleuret, 2019).

    Returns:
        Input times gradient, and bias times gradient at the output of every module with a bias; over everything, they
        sum to the logit.

    Raises:
        RelpropError: If they do not, for the net is of another kind.
    """
    twin = unshared(model)
    check_twin(model, twin, x)
    outputs: list[tuple[Tensor, Tensor]] = []
    for module in twin.modules():
        bias = _bias(module)
        if bias is not None:
            module.register_forward_hook(lambda _, __, out, b=bias: outputs.append((out, b)))
    score = _scores(twin(x.requires_grad_()), target)
    inner, *gradients = torch.autograd.grad(score.sum(), [x, *(out for out, _ in outputs)])
    parts = [x.detach() * inner]
    parts += [g * b.reshape(-1, *[1] * (g.ndim - 2)) for g, (_, b) in zip(gradients, outputs, strict=True)]
    missing = (score.detach() - sum(p.flatten(1).sum(1) for p in parts)).abs()
    if (missing > _TOLERANCE * (score.detach().abs() + sum(p.flatten(1).abs().sum(1) for p in parts))).any():
        raise RelpropError(
            f"The gradients at the input and the biases of {type(model).__name__} do not sum to its output; they do in "
            "nets of ReLUs whose biases are those of modules."
        )
    return parts[0], parts[1:]


def _bias(module: nn.Module) -> Tensor | None:
    """What a module adds whatever its input; None if nothing."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.running_mean is None or module.running_var is None:
            return None
        scale = (module.running_var + module.eps).rsqrt()
        mean: Tensor = module.running_mean
        return module.bias - mean * scale * module.weight if module.affine else -mean * scale
    bias = getattr(module, "bias", None) if isinstance(module, nn.Conv2d | nn.Linear) else None
    return bias if isinstance(bias, Tensor) else None


def _full_grad(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The sum of the decomposition's maps, absolute, each layer scaled to 0..1 (Srinivas and Fleuret, 2019)."""
    inner, biases = full_gradient(model, x, target)
    spatial = [inner, *(b for b in biases if b.ndim == 4)]
    return torch.stack([_enlarged(_unit(p.abs().flatten(1)).reshape(p.shape).sum(1, True), x) for p in spatial]).sum(0)


# -- layers --


def last_stage(model: nn.Module, x: Tensor) -> str:
    """The last module whose output still knows places: ``layer4`` in a ResNet.

    Raises:
        RelpropError: If there is none.
    """
    found: list[str] = []
    handles = []
    for name, module in model.named_modules():

        def look(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2:].numel() > 1:
                found.append(name)

        handles.append(module.register_forward_hook(look))
    with torch.no_grad():
        model(x[:1].clone())
    for handle in handles:
        handle.remove()
    if not found:
        raise RelpropError(f"{type(model).__name__} has no layer of feature maps (B, K, h, w) to make a map of.")
    return found[-1]


def _features(twin: nn.Module, x: Tensor, layer: str, *, gradients: bool) -> tuple[Tensor, Tensor]:
    """The feature maps that leave a layer the last time it is called, and the model's output from there on."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # The way back starts here, so nothing before it is kept for it; the clone may be written into.
        kept.append(output.detach().requires_grad_(gradients))
        return kept[-1].clone()

    names = dict(twin.named_modules())
    if layer not in names:
        raise RelpropError(f"There is no layer {layer!r}; the last ones are {', '.join([*names][-5:])}.")
    handle = names[layer].register_forward_hook(keep)
    output = twin(x)
    handle.remove()
    if not kept or kept[-1].ndim != 4:
        raise RelpropError(f"The layer {layer!r} gives no feature maps (B, K, h, w).")
    return kept[-1], output


def _scores(output: Tensor, target: Tensor) -> Tensor:
    return output.gather(1, target[:, None])[:, 0]


def _enlarged(maps: Tensor, x: Tensor) -> Tensor:
    return F.interpolate(maps, x.shape[2:], mode="bilinear", align_corners=False)


METHODS = (
    Method(
        "grad-cam",
        "cam",
        "none; before its ReLU it sums to the logit without its bias where the head is a mean and a matrix",
        1,
        "Selvaraju et al., 2017, Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization, "
        "ICCV",
        partial(_from_gradients, weigh=_grad_cam),
        spatial=True,
    ),
    Method(
        "grad-cam++",
        "cam",
        "none",
        1,
        "Chattopadhay et al., 2018, Grad-CAM++: Generalized Gradient-based Visual Explanations, WACV",
        partial(_from_gradients, weigh=_grad_cam_pp),
        spatial=True,
    ),
    Method(
        "layer-cam",
        "cam",
        "none",
        1,
        "Jiang et al., 2021, LayerCAM: Exploring Hierarchical Class Activation Maps for Localization, IEEE TIP 30",
        partial(_from_gradients, weigh=_layer_cam),
        spatial=True,
    ),
    Method(
        "full-grad",
        "cam",
        "its parts sum to the logit; their absolute values, each layer scaled, do not",
        2,
        "Srinivas and Fleuret, 2019, Full-Gradient Representation for Neural Network Visualization, NeurIPS",
        _full_grad,
        spatial=True,
    ),
    Method(
        "score-cam",
        "cam",
        "none",
        2048,
        "Wang et al., 2020, Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks, CVPR "
        "workshop",
        _score_cam,
        spatial=True,
    ),
)
