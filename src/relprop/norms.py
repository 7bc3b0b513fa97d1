"""Norms: layers that divide by a factor which the input decides about.

Layer, group, instance and RMS norms differ in what they average over. As presets ask it of batch norms, relevance
either passes them unchanged (the identity rule of Achtibat et al., 2024, section 3.3.3: nothing is lost), or the factor
is taken as a constant, which leaves a linear map with the mean's share in it (Ali et al., 2022), for the epsilon rule.

References:
    Ali et al., 2022: XAI for Transformers: Better Explanations through Conservative Propagation.
    Achtibat et al., 2024: AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.mapped import Mapped
from relprop.maps import LinearMap
from relprop.operators import Operator, Ref, register
from relprop.vocabulary import batch_norm

Average = Callable[[Tensor], Tensor]
"""The mean over what is normalised together, in a shape that broadcasts."""


class Centring(LinearMap):
    """``w (a - mean(a))``, with the norm's factor in ``w``.

    Args:
        weight: One factor an element.
        bias: What is added, or None.
        average: The mean; None for a norm without one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, average: Average | None) -> None:
        super().__init__(weight, bias)
        self._average = average

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return (a if self._average is None else a - self._average(a)) * weight

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002 - the output's
        s = (s.unflatten(0, (-1, len(weight))) * weight).flatten(0, 1)
        return s if self._average is None else s - self._average(s)


@dataclass(eq=False)
class Norm(Mapped):
    """A norm over some elements of each sample.

    Attributes:
        function: The norm.
        average: The mean over what is normalised together.
        centred: Whether that is subtracted.
        weight: What the result is multiplied with, or None.
        bias: What is added then, or None.
        eps: What is added to the variance.
        by_channel: Whether weight and bias have one number a channel, not one an element of the last axes.
    """

    function: Callable[[Tensor], Tensor]
    average: Average
    centred: bool
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    by_channel: bool = False
    clamps = False

    def forward(self, *values: Any) -> Any:
        return self.function(values[0])

    def shape(self, *values: Any) -> Any:
        return values[0]

    def map(self, *values: Any) -> LinearMap:
        a: Tensor = values[0]
        shape = (-1, *[1] * (a.ndim - 2)) if self.by_channel else None
        weight, bias = (t if t is None or shape is None else t.reshape(shape) for t in (self.weight, self.bias))
        b = a - self.average(a) if self.centred else a
        factor = (self.average(b * b) + self.eps).rsqrt() * (1.0 if weight is None else weight)
        return Centring(factor.expand(a.shape), bias, self.average if self.centred else None)


@register(F.layer_norm)
def _layer_norm(
    x: Ref, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Operator:
    axes = tuple(range(-len(normalized_shape), 0))

    def function(a: Tensor) -> Tensor:
        return F.layer_norm(a, list(normalized_shape), weight, bias, eps)

    return Norm("layer_norm", (x,), function, _over(axes), True, weight, bias, eps)


def _over(axes: tuple[int, ...]) -> Average:
    return lambda a: a.mean(axes, keepdim=True)


@register(nn.LayerNorm)
def _layer_norm_module(m: nn.LayerNorm, x: Ref) -> Operator:
    return _layer_norm(x, m.normalized_shape, _detached(m.weight), _detached(m.bias), m.eps)


@register(F.rms_norm)
def _rms_norm(x: Ref, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Operator:
    axes = tuple(range(-len(normalized_shape), 0))
    small = torch.finfo(torch.float32).eps if eps is None else eps

    def function(a: Tensor) -> Tensor:
        return F.rms_norm(a, list(normalized_shape), weight, eps)

    return Norm("rms_norm", (x,), function, _over(axes), False, weight, None, small)


@register(nn.RMSNorm)
def _rms_norm_module(m: nn.RMSNorm, x: Ref) -> Operator:
    return _rms_norm(x, m.normalized_shape, _detached(m.weight), m.eps)


@register(F.group_norm)
def _group_norm(x: Ref, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Operator:
    return _grouped(
        "group_norm", x, num_groups, weight, bias, eps, lambda a: F.group_norm(a, num_groups, weight, bias, eps)
    )


def _grouped(
    label: str,
    x: Ref,
    groups: int | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    function: Callable[[Tensor], Tensor],
) -> Operator:
    def average(a: Tensor) -> Tensor:
        parts = a.reshape(a.shape[0], a.shape[1] if groups is None else groups, -1)
        return parts.mean(-1, keepdim=True).expand_as(parts).reshape(a.shape)

    return Norm(label, (x,), function, average, True, weight, bias, eps, by_channel=True)


@register(nn.GroupNorm)
def _group_norm_module(m: nn.GroupNorm, x: Ref) -> Operator:
    return _group_norm(x, m.num_groups, _detached(m.weight), _detached(m.bias), m.eps)


@register(F.instance_norm)
def _instance_norm(
    x: Ref,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,  # noqa: ARG001 - has a meaning in training only
    eps: float = 1e-5,
) -> Operator:
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)

    def function(a: Tensor) -> Tensor:
        return F.instance_norm(a, None, None, weight, bias, True, 0.0, eps)

    return _grouped("instance_norm", x, None, weight, bias, eps, function)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm_module(m: nn.InstanceNorm2d, x: Ref) -> Operator:
    own = m.running_mean is None
    return _instance_norm(x, m.running_mean, m.running_var, _detached(m.weight), _detached(m.bias), own, eps=m.eps)


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()
