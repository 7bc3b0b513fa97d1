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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from relprop.errors import RelpropError
from relprop.maps import Convolution, Dense, Diagonal, LinearMap, Mean
from relprop.pools import Pool, Sliding
from relprop.tiles import tiles


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
        """Computes the node's value for tensors without contents (on torch's meta device)."""
        return self.forward(*values)


@dataclass(eq=False)
class Elementwise(Operator):
    """A function that relevance passes unchanged: activations, dropout, identity.

    Attributes:
        function: The function, not in place.
        nonnegative: Whether its values are never negative; None if they are as its input's.
        in_place: The same function writing into its input, for when nobody else needs that.
        identity: Whether it returns just what it is given.
        alias: Whether it does so in the same memory.
    """

    function: Callable[[Tensor], Tensor]
    nonnegative: bool | None = False
    in_place: Callable[[Tensor], Tensor] | None = None
    identity: bool = False
    alias: bool = False

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
        return self.linear.apply(values[0], self.linear.weight.to("meta"))

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

    def shape(self, *values: Any) -> Any:
        return values[0].new_empty(self.pool.shape(values[0].shape))

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

    def shape(self, *values: Any) -> Any:
        if 0 in [axis % values[0].ndim for axis in self.axes]:
            msg = f"{self.label} over axis 0 mixes the samples of a batch, so it has no rule; leave that axis out."
            raise RelpropError(msg)
        return self.forward(*values)

    def map(self, a: Tensor) -> LinearMap:
        axes = [axis % a.ndim for axis in self.axes]
        scale = 1 / math.prod(a.shape[axis] for axis in axes) if self.mean else 1.0
        return Mean(axes, self.keep, a.new_full((), scale))


@dataclass(eq=False)
class BatchNorm(Mapped):
    """A batch norm in evaluation: one factor and one shift a channel."""

    scale: Tensor
    shift: Tensor

    def forward(self, *values: Any) -> Any:
        return self.map(values[0])(values[0])

    def shape(self, *values: Any) -> Any:
        return values[0]

    def map(self, a: Tensor) -> LinearMap:
        shape = (-1, *[1] * (a.ndim - 2))
        return Diagonal(self.scale.reshape(shape), self.shift.reshape(shape))


@dataclass(eq=False)
class MaxPool(Operator):
    """A max pool; what stands for it on the way back is the plan's choice."""

    pool: Pool

    def forward(self, *values: Any) -> Any:
        return self.pool.forward(values[0])

    def shape(self, *values: Any) -> Any:
        return values[0].new_empty(self.pool.shape(values[0].shape))

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

    def shape(self, *values: Any) -> Any:
        constant = [] if not isinstance(self.constant, Tensor) else [self.constant.to("meta")]
        return values[0].new_empty(torch.broadcast_shapes(*(v.shape for v in (*values, *constant))))

    def activated(self, *values: Any) -> Any:
        """The ReLU of the sum."""
        if len(values) != 2 or self.parts != 2 or self.factors != (1, 1) or values[0].shape != values[1].shape:
            return self.forward(*values).relu_()
        result = torch.empty_like(values[0])
        for one, other, both in tiles(*values, result):
            torch.add(one, other, out=both).relu_()
        return result

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
        result = self.function(*values)
        if getattr(result, "shape", None) != values[0].shape:
            msg = f"relevance cannot pass {self.label} unchanged, for it changes the shape of its input"
            raise RelpropError(msg)
        return result

    def shape(self, *values: Any) -> Any:
        try:
            return self.forward(*values)
        except (RuntimeError, NotImplementedError):  # not every function knows tensors without contents
            return values[0]


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


# arithmetic on shapes

SHAPES = {"size", "dim", "numel", "ndimension", "shape", "ndim", "dtype", "device", len}
"""What turns a tensor into numbers: the name of a method or an attribute, or a function."""

ARITHMETIC = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, int, max, min,
    math.ceil, math.floor, math.prod, torch._assert,
}  # fmt: skip
"""What may be done with such numbers."""
