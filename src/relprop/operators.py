"""Operators: what a node of the graph computes.

A model writes the same operation in many ways (``nn.ReLU``, ``F.relu``, ``torch.relu``, ``x.relu_()``). Each way is
looked up in one table, whose builders turn it into one of a few kinds that the rest of the house knows: linear maps,
max pools, sums, rearrangements and elementwise functions. In-place ways become their safe twins here.

A new operator takes a few lines; the arguments are those of the call, with a :class:`Ref` wherever a tensor comes in::

    @relprop.operators.register(torch.nn.functional.mish)
    def mish(x, inplace=False):
        return relprop.operators.Elementwise("mish", (x,), torch.nn.functional.mish)
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.errors import RelpropError
from relprop.maps import Convolution, Dense, Diagonal, LinearMap, Mean
from relprop.pools import Adaptive, Pool, Sliding


@dataclass(frozen=True)
class Ref:
    """Stands for the value of another node among a call's arguments."""

    node: int


@dataclass(eq=False)
class Operator:
    """What a node computes.

    Attributes:
        label: Short name for tables.
        inputs: The nodes that :meth:`forward` takes the values of, in order.
    """

    label: str
    inputs: tuple[Ref, ...]

    def forward(self, *values: Any) -> Any:
        """Computes the node's value."""
        raise NotImplementedError  # every operator below has its own

    def shape(self, *values: Any) -> Any:
        """Computes the node's value for tensors without contents, and remembers nothing of it."""
        return self.forward(*values)


@dataclass(eq=False)
class Elementwise(Operator):
    """A function that relevance passes unchanged: activations, dropout, identity.

    Attributes:
        function: The function, not in place.
        nonnegative: Whether its values are never negative; None if they are as its input's.
        in_place: The same function writing into its input, for when nobody else needs that.
        identity: Whether it returns just what it is given.
    """

    function: Callable[[Tensor], Tensor]
    nonnegative: bool | None = False
    in_place: Callable[[Tensor], Tensor] | None = None
    identity: bool = False

    def forward(self, *values: Any) -> Any:
        return self.function(values[0])


@dataclass(eq=False)
class Reshape(Operator):
    """A new shape for the same elements in the same order."""

    function: Callable[..., Tensor]

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def back(self, r: Tensor, shape: Sequence[int]) -> Tensor:
        """Brings relevance ``(T, B, ...)`` back to an input of a shape, batch included."""
        return r.reshape(r.shape[0], *shape)


@dataclass(eq=False)
class Permute(Reshape):
    """The same elements with their axes in another order."""

    def back(self, r: Tensor, shape: Sequence[int]) -> Tensor:
        # Axes of different sizes tell where each of them went.
        sizes = range(2, 2 + len(shape))
        order = [size - 2 for size in self.function(torch.empty(*sizes, device="meta")).shape]
        return r.permute(0, *[1 + order.index(axis) for axis in range(len(order))])


class Mapped(Operator, ABC):
    """Anything that is a linear map of its input."""

    weighted = False
    """Whether it has learned weights that mix inputs: a convolution or a matrix."""

    @abstractmethod
    def map(self, a: Tensor) -> LinearMap:
        """The map, for an input like ``a``."""


@dataclass(eq=False)
class Linear(Mapped):
    """A linear map with weights of its own: a convolution or a matrix."""

    linear: Convolution | Dense
    weighted = True
    _folded: dict[BatchNorm, LinearMap] = field(default_factory=dict, repr=False)

    def forward(self, *values: Any) -> Any:
        return self.linear(values[0])

    def shape(self, *values: Any) -> Any:
        return self.linear.apply(values[0], self.linear.weight)

    def folded(self, norm: BatchNorm) -> LinearMap:
        """The map with a batch norm behind it folded in, computed once."""
        if norm not in self._folded:
            assert isinstance(self.linear, Convolution | Dense)
            self._folded[norm] = self.linear.scaled(norm.scale, norm.shift)
        return self._folded[norm]

    def map(self, a: Tensor) -> LinearMap:  # noqa: ARG002 - the same for every input
        return self.linear


@dataclass(eq=False)
class AveragePool(Mapped):
    """An average pool: a linear map whose matrix depends on the input's size."""

    pool: Pool

    def forward(self, *values: Any) -> Any:
        return self.pool.forward(values[0])

    def map(self, a: Tensor) -> LinearMap:
        return self.pool.average(a)


@dataclass(eq=False)
class Reduction(Mapped):
    """The mean or the sum over some axes."""

    axes: tuple[int, ...]
    keep: bool
    mean: bool

    def forward(self, *values: Any) -> Any:
        return (torch.mean if self.mean else torch.sum)(values[0], self.axes, keepdim=self.keep)

    def map(self, a: Tensor) -> LinearMap:
        axes = [axis % a.ndim for axis in self.axes]
        if 0 in axes:
            msg = f"{self.label} over axis 0 mixes the samples of a batch, so no relevance can be told for one of them."
            raise RelpropError(msg)
        scale = 1 / math.prod(a.shape[axis] for axis in axes) if self.mean else 1.0
        return Mean(axes, self.keep, a.new_full((), scale))


@dataclass(eq=False)
class BatchNorm(Mapped):
    """A batch norm in evaluation: one factor and one shift a channel."""

    scale: Tensor
    shift: Tensor

    def forward(self, *values: Any) -> Any:
        return self.map(values[0])(values[0])

    def map(self, a: Tensor) -> LinearMap:
        shape = (-1, *[1] * (a.ndim - 2))
        return Diagonal(self.scale.reshape(shape), self.shift.reshape(shape))


@dataclass(eq=False)
class MaxPool(Operator):
    """A max pool; what stands for it on the way back is the plan's choice."""

    pool: Pool

    def forward(self, *values: Any) -> Any:
        return self.pool.forward(values[0])

    @cached_property
    def halves(self) -> Pool:
        """The pool that the released code puts in its place: windows of two, side by side."""
        axes = self.pool.axes
        return Pool(Sliding((2,) * axes, (2,) * axes, (0,) * axes, (1,) * axes), self.pool.forward, "max")


@dataclass(eq=False)
class Sum(Operator):
    """A sum of branches, each with a factor, and of constants."""

    factors: tuple[float, ...]
    constant: Tensor | float | None = None

    @property
    def parts(self) -> int:
        """How many things are added, constants counted as one."""
        return len(self.inputs) + (self.constant is not None)

    def forward(self, *values: Any) -> Any:
        parts = [*self.branches(values), *([] if self.constant is None else [self.constant])]
        return sum(parts[1:], start=parts[0]) if len(parts) > 1 else parts[0] + 0

    def branches(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What is added, constants left out."""
        return [v if f == 1 else v * f for v, f in zip(values, self.factors, strict=True)]


@dataclass(eq=False)
class Scalar(Operator):
    """Arithmetic on shapes: no tensor, no relevance."""

    function: Callable[..., Any]

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


@dataclass(eq=False)
class Unknown(Operator):
    """An operator without a rule: it can be computed, but stops the plan."""

    function: Callable[..., Any]

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


# -- the table --

Builder = Callable[..., Operator]
TABLE: dict[Any, Builder] = {}
"""From a module type, a function or a tensor method's name to the builder of its operator."""


def register(*targets: Any) -> Callable[[Builder], Builder]:
    """Registers a builder for module types, functions, or tensor methods (by name).

    The builder is called with the arguments of the call, a :class:`Ref` for each tensor that comes in; for a module
    type, with the module in front of them. It returns the operator.
    """

    def add(builder: Builder) -> Builder:
        TABLE.update(dict.fromkeys(targets, builder))
        return builder

    return add


def find(target: Any) -> Builder | None:
    """The builder for a module type (or one of its bases), a function or a method's name."""
    if isinstance(target, type):
        return next((TABLE[base] for base in target.__mro__ if base in TABLE), None)
    return TABLE.get(target)


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
    if return_indices:
        msg = "a max pool that returns indices has no rule"
        raise RelpropError(msg)
    kernel = _tuple(kernel_size, axes)
    windows = Sliding(
        kernel, _tuple(stride, axes) if stride else kernel, _tuple(padding, axes), _tuple(dilation, axes), ceil_mode
    )
    forward = _pool_forward(function, kernel, windows.stride, windows.padding, windows.dilation, ceil_mode)
    return MaxPool(f"max_pool{axes}d", (x,), Pool(windows, forward, "max"))


def _max_pool_module(axes: int, function: Callable[..., Tensor], m: nn.MaxPool2d, x: Ref) -> Operator:
    settings = (m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)
    return _max_pool(axes, function, x, *settings)


def _adaptive(axes: int, function: Callable[..., Tensor], kind: str, x: Ref, output_size: Any, *_: Any) -> Operator:
    size = tuple(output_size) if isinstance(output_size, Iterable) else (output_size,) * axes
    pool = Pool(Adaptive(size), _pool_forward(function, output_size), kind)
    label = f"adaptive_{'max' if kind == 'max' else 'avg'}_pool{axes}d"
    return MaxPool(label, (x,), pool) if kind == "max" else AveragePool(label, (x,), pool)


def _adaptive_module(
    axes: int, function: Callable[..., Tensor], kind: str, m: nn.AdaptiveAvgPool2d, x: Ref
) -> Operator:
    return _adaptive(axes, function, kind, x, m.output_size)


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
    return _batch_norm(x, m.running_mean, m.running_var, _detached(m.weight), _detached(m.bias), eps=m.eps)


@register(F.batch_norm)
def _batch_norm(
    x: Ref,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,  # noqa: ARG001 - has a meaning in training only
    eps: float = 1e-5,
) -> Operator:
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


def _same(label: str, x: Ref) -> Operator:
    return Elementwise(label, (x,), lambda value: value, nonnegative=None, identity=True)


@register(nn.Identity, "contiguous", "clone", "detach")
def _identity(*args: Any, **_: Any) -> Operator:
    return _same("identity", _ref(args))


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


def _rearrange(kind: type[Reshape], label: str, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Operator:
    """The tensor, and every number that comes from a shape, are its inputs."""
    return kind(label, tuple(refs((args, kwargs))), bound(function, args, kwargs))


def refs(value: Any) -> list[Ref]:
    """The refs among some arguments, in the order in which they stand."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [ref for item in value for ref in refs(item)] if isinstance(value, list | tuple) else []


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """A function of the values of the refs among some arguments, in the order in which they stand."""

    def call(*values: Any) -> Any:
        rest = iter(values)

        def fill(value: Any) -> Any:
            if isinstance(value, Ref):
                return next(rest)
            if isinstance(value, list | tuple):
                return (
                    [fill(item) for item in value] if isinstance(value, list) else tuple(fill(item) for item in value)
                )
            return value

        filled = [fill(a) for a in args]
        return function(*filled, **{name: fill(a) for name, a in kwargs.items()})

    return call


for _name, _targets in {
    "flatten": (torch.flatten, "flatten"),
    "reshape": (torch.reshape, "reshape"),
    "squeeze": (torch.squeeze, "squeeze"),
    "unsqueeze": (torch.unsqueeze, "unsqueeze"),
    "unflatten": (torch.unflatten, "unflatten"),
}.items():
    register(*_targets)(partial(_rearrange, Reshape, _name, getattr(Tensor, _name)))
# A view asks for a layout that our tensors, channels last, need not have.
register("view")(partial(_rearrange, Reshape, "view", Tensor.reshape))

for _name in ("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"):
    register(getattr(torch, _name), _name)(partial(_rearrange, Permute, _name, getattr(Tensor, _name)))


@register(nn.Flatten)
def _flatten_module(m: nn.Flatten, x: Ref) -> Operator:
    return _rearrange(Reshape, "flatten", Tensor.flatten, x, m.start_dim, m.end_dim)


@register(nn.Unflatten)
def _unflatten_module(m: nn.Unflatten, x: Ref) -> Operator:
    return _rearrange(Reshape, "unflatten", Tensor.unflatten, x, m.dim, m.unflattened_size)


# sums


@register(operator.add, operator.iadd, torch.add, "add", "add_", "__iadd__")
def _add(a: Any, b: Any = 0, *, alpha: float = 1, other: Any = None) -> Operator:
    return _sum([(a, 1.0), (b if other is None else other, float(alpha))])


@register(operator.sub, operator.isub, torch.sub, "sub", "sub_")
def _sub(a: Any, b: Any = 0, *, alpha: float = 1, other: Any = None) -> Operator:
    return _sum([(a, 1.0), (b if other is None else other, -float(alpha))])


def _sum(terms: Sequence[tuple[Any, float]]) -> Operator:
    factors: dict[Ref, float] = {}  # t + t is one branch, taken twice
    constant: Any = None
    for term, factor in terms:
        if isinstance(term, Ref):
            factors[term] = factors.get(term, 0.0) + factor
        elif isinstance(term, Tensor) or term != 0:
            constant = term * factor if constant is None else constant + term * factor
    return Sum("add", tuple(factors), tuple(factors.values()), constant)


# arithmetic on shapes

SHAPES = {"size", "dim", "numel", "ndimension", getattr, len}
"""What turns a tensor into numbers, as a method's name or a function (``getattr`` for ``x.shape``)."""

ARITHMETIC = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, int, max, min,
    math.ceil, math.floor, math.prod, torch._assert,
}  # fmt: skip
"""What may be done with such numbers."""
