"""The vocabulary: how torch spells each operator.

One entry a spelling, in :data:`relprop.operators.TABLE`: module types, functions and tensor methods. Modules are turned
into the call of the function that they stand for, so that the two cannot differ.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.convolution import Convolution
from relprop.errors import RelpropError
from relprop.mapped import AveragePool, BatchNorm, Linear, Reduction
from relprop.maps import Dense
from relprop.operators import Elementwise, MaxPool, Operator, Permute, Ref, Reshape, Sum, bound, refs, register
from relprop.pools import Adaptive, Pool, Sliding


def _tuple(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value) * (axes if len(value) == 1 else 1)


# linear maps


def _conv(
    axes: int,
    x: Ref,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Operator:
    dilation = _tuple(dilation, axes)
    if padding == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(span // 2, span - span // 2) for span in spans]
    else:
        pads = [(p, p) for p in _tuple(0 if isinstance(padding, str) else padding, axes)]
    linear = Convolution(weight, bias, _tuple(stride, axes), pads, dilation, groups)
    return Linear(f"conv{axes}d", (x,), linear)


def _conv_module(axes: int, module: nn.Conv2d, x: Ref) -> Operator:
    if module.padding_mode != "zeros":
        msg = f"a convolution with padding_mode={module.padding_mode!r} has no rule, only zero padding has"
        raise RelpropError(msg)
    settings = (module.stride, module.padding, module.dilation, module.groups)
    return _conv(axes, x, module.weight.detach(), _detached(module.bias), *settings)


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()


def _pool_forward(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, *args, **kwargs)


def _avg_pool(
    axes: int,
    function: Callable[..., Tensor],
    x: Ref,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Operator:
    kernel = _tuple(kernel_size, axes)
    steps = _tuple(stride, axes) if stride else kernel
    extra = () if divisor_override is None else (divisor_override,)
    forward = _pool_forward(function, kernel, steps, padding, ceil_mode, count_include_pad, *extra)
    windows = Sliding(kernel, steps, _tuple(padding, axes), (1,) * axes, ceil_mode)
    return AveragePool(f"avg_pool{axes}d", (x,), Pool(windows, forward, "average"))


def _avg_pool_module(axes: int, function: Callable[..., Tensor], m: nn.AvgPool2d, x: Ref) -> Operator:
    divisor = getattr(m, "divisor_override", None)
    return _avg_pool(axes, function, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, divisor)


def _max_pool(
    axes: int,
    function: Callable[..., Tensor],
    x: Ref,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Operator:
    _refuse_indices(return_indices)
    kernel = _tuple(kernel_size, axes)
    windows = Sliding(
        kernel, _tuple(stride, axes) if stride else kernel, _tuple(padding, axes), _tuple(dilation, axes), ceil_mode
    )
    forward = _pool_forward(function, kernel, windows.stride, windows.padding, windows.dilation, ceil_mode)
    return MaxPool(f"max_pool{axes}d", (x,), Pool(windows, forward, "max"))


def _refuse_indices(asked: bool) -> None:
    if asked:
        msg = "a max pool that returns indices has no rule"
        raise RelpropError(msg)


def _max_pool_module(axes: int, function: Callable[..., Tensor], m: nn.MaxPool2d, x: Ref) -> Operator:
    settings = (m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)
    return _max_pool(axes, function, x, *settings)


def _adaptive(
    axes: int, function: Callable[..., Tensor], kind: str, x: Ref, output_size: Any, return_indices: bool = False
) -> Operator:
    _refuse_indices(return_indices)
    size = tuple(output_size) if isinstance(output_size, Iterable) else (output_size,) * axes
    pool = Pool(Adaptive(size), _pool_forward(function, output_size), kind)
    label = f"adaptive_{'max' if kind == 'max' else 'avg'}_pool{axes}d"
    return MaxPool(label, (x,), pool) if kind == "max" else AveragePool(label, (x,), pool)


def _adaptive_module(
    axes: int, function: Callable[..., Tensor], kind: str, m: nn.AdaptiveAvgPool2d, x: Ref
) -> Operator:
    return _adaptive(axes, function, kind, x, m.output_size, getattr(m, "return_indices", False))


for _axes in (1, 2, 3):
    _f = {name: getattr(F, f"{name}{_axes}d") for name in ("conv", "avg_pool", "max_pool")}
    _m = {name: getattr(nn, f"{name}{_axes}d") for name in ("Conv", "AvgPool", "MaxPool")}
    register(_f["conv"], getattr(torch, f"conv{_axes}d"))(partial(_conv, _axes))
    register(_m["Conv"])(partial(_conv_module, _axes))
    register(_f["avg_pool"])(partial(_avg_pool, _axes, _f["avg_pool"]))
    register(_m["AvgPool"])(partial(_avg_pool_module, _axes, _f["avg_pool"]))
    register(_f["max_pool"], getattr(torch, f"max_pool{_axes}d"))(partial(_max_pool, _axes, _f["max_pool"]))
    register(_m["MaxPool"])(partial(_max_pool_module, _axes, _f["max_pool"]))
    for _kind, _short in (("average", "avg"), ("max", "max")):
        _fn = getattr(F, f"adaptive_{_short}_pool{_axes}d")
        register(_fn)(partial(_adaptive, _axes, _fn, _kind))
        register(getattr(nn, f"Adaptive{_short.title()}Pool{_axes}d"))(partial(_adaptive_module, _axes, _fn, _kind))


@register(F.linear)
def _linear(x: Ref, weight: Tensor, bias: Tensor | None = None) -> Operator:
    return Linear("linear", (x,), Dense(weight, bias))


@register(nn.Linear)
def _linear_module(module: nn.Linear, x: Ref) -> Operator:
    return _linear(x, module.weight.detach(), _detached(module.bias))


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm_module(m: nn.BatchNorm2d, x: Ref) -> Operator:
    return batch_norm(x, m.running_mean, m.running_var, _detached(m.weight), _detached(m.bias), eps=m.eps)


@register(F.batch_norm)
def batch_norm(
    x: Ref,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,  # noqa: ARG001 - has a meaning in training only
    eps: float = 1e-5,
) -> Operator:
    """A batch norm in evaluation."""
    if training or running_mean is None or running_var is None:
        msg = "a batch norm without running statistics mixes the samples of a batch, so it has no rule"
        raise RelpropError(msg)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    return BatchNorm("batch_norm", (x,), scale, shift if bias is None else shift + bias)


@register(torch.mean, "mean")
def _mean(x: Ref, dim: Any = None, keepdim: bool = False, **_: Any) -> Operator:
    return _reduce("mean", x, dim, keepdim)


@register(torch.sum, "sum")
def _reduced_sum(x: Ref, dim: Any = None, keepdim: bool = False, **_: Any) -> Operator:
    return _reduce("sum", x, dim, keepdim)


def _reduce(name: str, x: Ref, dim: Any, keepdim: bool) -> Operator:
    if dim is None:
        msg = f"{name} over all axes mixes the samples of a batch, so it has no rule; name the axes"
        raise RelpropError(msg)
    return Reduction(name, (x,), (dim,) if isinstance(dim, int) else tuple(dim), keepdim, name == "mean")


# elementwise functions that relevance passes


@register(nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
def _relu(*args: Any, **_: Any) -> Operator:
    return Elementwise("relu", (_ref(args),), torch.relu, nonnegative=True, in_place=torch.relu_)


@register(nn.ReLU6, F.relu6)
def _relu6(*args: Any, **_: Any) -> Operator:
    return Elementwise("relu6", (_ref(args),), F.relu6, nonnegative=True)


@register(nn.LeakyReLU, F.leaky_relu, F.leaky_relu_)
def _leaky_relu(*args: Any, **kwargs: Any) -> Operator:
    slope = (
        args[0].negative_slope
        if isinstance(args[0], nn.LeakyReLU)
        else dict(enumerate(args)).get(1, kwargs.get("negative_slope", 0.01))
    )
    return Elementwise("leaky_relu", (_ref(args),), partial(F.leaky_relu, negative_slope=slope), nonnegative=None)


def _same(label: str, x: Ref, alias: bool = True) -> Operator:
    return Elementwise(label, (x,), lambda value: value, nonnegative=None, identity=True, alias=alias)


@register(nn.Identity, "contiguous", "detach", "data")
def _identity(*args: Any, **_: Any) -> Operator:
    return _same("identity", _ref(args))


def identity(x: Ref) -> Operator:
    """What returns just what it is given."""
    return _same("identity", x)


@register("clone", torch.clone)
def _clone(x: Ref, **_: Any) -> Operator:
    return _same("clone", x, alias=False)


@register(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
def _dropout_module(module: nn.Module, x: Ref) -> Operator:  # noqa: ARG001 - in evaluation its settings do not matter
    return _same("dropout", x)


@register(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
def _dropout(x: Ref, p: float = 0.5, training: bool = True, inplace: bool = False) -> Operator:  # noqa: ARG001 - as above
    if training:
        msg = "F.dropout drops at random here; pass training=self.training to it"
        raise RelpropError(msg)
    return _same("dropout", x)


def _ref(args: Sequence[Any]) -> Ref:
    """The tensor among a call's first arguments: the second one where the first is the module."""
    return next(arg for arg in args[:2] if isinstance(arg, Ref))


# the same elements in another shape or order


def rearrange(kind: type[Reshape], label: str, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Operator:
    """An operator that rearranges; the tensor, and every number that comes from a shape, are its inputs."""
    return kind(label, tuple(refs((args, kwargs))), bound(function, args, kwargs))


for _name, _targets in {
    "flatten": (torch.flatten, "flatten"),
    "reshape": (torch.reshape, "reshape"),
    "squeeze": (torch.squeeze, "squeeze"),
    "unsqueeze": (torch.unsqueeze, "unsqueeze"),
    "unflatten": (torch.unflatten, "unflatten"),
    "view_as": ("view_as",),
    "reshape_as": ("reshape_as",),
}.items():
    register(*_targets, numbers=True)(partial(rearrange, Reshape, _name, getattr(Tensor, _name)))
# A view asks for a layout that our tensors, channels last, need not have.
register("view", numbers=True)(partial(rearrange, Reshape, "view", Tensor.reshape))

for _name in ("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t"):
    register(getattr(torch, _name), _name, numbers=True)(partial(rearrange, Permute, _name, getattr(Tensor, _name)))
for _name in ("T", "mT"):
    register(_name, numbers=True)(partial(rearrange, Permute, _name, operator.attrgetter(_name)))


@register(nn.Flatten)
def _flatten_module(m: nn.Flatten, x: Ref) -> Operator:
    return rearrange(Reshape, "flatten", Tensor.flatten, x, m.start_dim, m.end_dim)


@register(nn.Unflatten)
def _unflatten_module(m: nn.Unflatten, x: Ref) -> Operator:
    return rearrange(Reshape, "unflatten", Tensor.unflatten, x, m.dim, m.unflattened_size)


# sums


@register(operator.add, operator.iadd, torch.add, "add", "add_", "__iadd__")
def _add(a: Any, b: Any = 0, *, alpha: float = 1, other: Any = None) -> Operator:
    return added([(a, 1.0), (b if other is None else other, float(alpha))])


@register(operator.sub, operator.isub, torch.sub, "sub", "sub_")
def _sub(a: Any, b: Any = 0, *, alpha: float = 1, other: Any = None) -> Operator:
    return added([(a, 1.0), (b if other is None else other, -float(alpha))])


def added(terms: Sequence[tuple[Any, float]]) -> Sum:
    """The sum of some terms, each with a factor: refs are branches, all else is constant."""
    factors: dict[Ref, float] = {}  # t + t is one branch, taken twice
    constant: Any = None
    for term, factor in terms:
        if isinstance(term, Ref):
            factors[term] = factors.get(term, 0.0) + factor
        elif isinstance(term, Tensor) or term != 0:
            constant = term * factor if constant is None else constant + term * factor
    return Sum("add", tuple(factors), tuple(factors.values()), constant)
