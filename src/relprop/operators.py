"""Operators: what a node of the graph computes.

A model writes the same operation in many ways (``nn.ReLU``, ``F.relu``, ``torch.relu``, ``x.relu_()``). Each way is
looked up in one table, whose builders turn it into one of a few kinds that the rest of the house knows: linear maps,
max pools, sums, rearrangements and elementwise functions. In-place ways become their safe twins here.

A new operator takes a few lines; the arguments are those of the call, with a :class:`Ref` wherever a tensor comes in::

    @relprop.operators.register(torch.nn.functional.hardshrink)
    def hardshrink(x, lambd=0.5):
        return relprop.operators.Elementwise("hardshrink", (x,), lambda v: torch.nn.functional.hardshrink(v, lambd))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from relprop.errors import RelpropError
from relprop.pools import Pool, Sliding
from relprop.rules import Handed

Total = Callable[[Tensor], Tensor]
"""Sums relevance to one number a target and sample."""


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
    looks = False
    """Whether :meth:`hand` looks at the values of the inputs, not only at their shapes."""

    def forward(self, *values: Any) -> Any:
        """Computes the node's value."""
        raise NotImplementedError  # every operator below has its own

    def shape(self, *values: Any) -> Any:
        """Computes the node's value for tensors without contents (on torch's meta device)."""
        return self.forward(*values)

    @property
    def heirs(self) -> tuple[int, ...]:
        """Which of its inputs, by position, can get relevance; the others count as constants."""
        return tuple(range(len(self.inputs)))

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - some absorb something
        """Hands relevance on where the plan leaves no choice: here, all of it to the first input.

        Args:
            r: Relevance of the output, ``(T, ...)``.
            values: The inputs; of those that get relevance, only the shapes matter.
            total: Sums relevance of the output to one number a target and sample.
        """
        return Handed((reduced(r, values[0].shape),), {})

    def probe(self, *values: Any) -> Tensor:
        """Computes the node's value for numbers of samples, the same in all elements of one: nothing may mix them."""
        tensors = [v for v in values if isinstance(v, Tensor)]
        return max(tensors, key=lambda v: (not v.isnan().all(), v.numel()))  # NaN: a constant, which is in no sample


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

    function: Callable[..., Tensor]
    nonnegative: bool | None = False
    in_place: Callable[[Tensor], Tensor] | None = None
    identity: bool = False
    alias: bool = False

    @property
    def heirs(self) -> tuple[int, ...]:
        return (0,)

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def shape(self, *values: Any) -> Any:
        return values[0]

    def probe(self, *values: Any) -> Tensor:
        first: Tensor = values[0]
        return first


@dataclass(eq=False)
class Reshape(Operator):
    """A new shape for the same elements in the same order."""

    function: Callable[..., Tensor]

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def probe(self, *values: Any) -> Tensor:
        return self.function(*values)

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        return Handed((r.reshape(len(r), *values[0].shape),), {})


@dataclass(eq=False)
class Permute(Reshape):
    """The same elements with their axes in another order."""

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        # Axes of different sizes tell where each of them went.
        sizes = range(2, 2 + values[0].ndim)
        order = [size - 2 for size in self.function(torch.empty(*sizes, device="meta"), *values[1:]).shape]
        return Handed((r.permute(0, *[1 + order.index(axis) for axis in range(len(order))]),), {})


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

    def activated(self, *values: Any) -> Any:
        """The ReLU of the sum."""
        if self.parts == 2 and self.factors == (1, 1) and values[0].device.type == "cpu":
            return torch.ops.aten._add_relu(*values)  # in one pass, which other devices do not have
        return self.forward(*values).relu_()

    def shape(self, *values: Any) -> Any:
        constant = [] if not isinstance(self.constant, Tensor) else [self.constant.to("meta")]
        return values[0].new_empty(torch.broadcast_shapes(*(v.shape for v in (*values, *constant))))

    def branches(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What is added, constants left out."""
        return [v if f == 1 else v * f for v, f in zip(values, self.factors, strict=True)]


@dataclass(eq=False)
class Scalar(Operator):
    """Arithmetic on shapes: no tensor, no relevance."""

    function: Callable[..., Any]

    @property
    def heirs(self) -> tuple[int, ...]:
        return ()

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


@dataclass(eq=False)
class Constant(Scalar):
    """A tensor that depends on nothing but shapes, such as a class token for each sample: it keeps what it gets."""

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - the inputs get nothing
        return Handed((), {"constant": total(r)})

    def shape(self, *values: Any) -> Any:
        return _hollow(self.function, values)


@dataclass(eq=False)
class Several(Scalar):
    """A call that returns several tensors, each of which is an operator of its own: nobody asks for all of them.

    Attributes:
        part: Builds the operator of one of them, by its number.
    """

    part: Callable[[int], Operator]


@dataclass(eq=False)
class Unknown(Operator):
    """An operator without a rule: it can be computed, but stops the plan if relevance reaches it.

    Attributes:
        function: What it computes.
        wrapped: Whether it is a function of the model's own, which can be looked into once shapes are known.
    """

    function: Callable[..., Any]
    wrapped: bool = False

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def shape(self, *values: Any) -> Any:
        return _hollow(self.function, values)

    def check(self, before: Any, after: Any) -> None:
        """Refuses to pass relevance through what changes the shape.

        Raises:
            RelpropError: If it does.
        """
        if getattr(after, "shape", None) != before.shape:
            msg = f"Relevance cannot pass {self.label} unchanged, for it changes the shape of its input."
            raise RelpropError(msg)


def _hollow(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """What a function returns for tensors without contents, which not every function knows: for zeros, then."""
    try:
        value = function(*values)
    except (RuntimeError, NotImplementedError):  # which of them, depends on the function
        value = function(*(torch.zeros_like(v, device="cpu") if isinstance(v, Tensor) else v for v in values))
    return value.to("meta") if isinstance(value, Tensor) else value


def reduced(share: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums a share ``(T, ...)`` over the axes along which what gets it was broadcast."""
    if share.shape[1:] == shape:
        return share
    extra = share.ndim - 1 - len(shape)
    if extra:
        share = share.sum(list(range(1, 1 + extra)))
    axes = [axis for axis, n in enumerate(shape, start=1) if n == 1 and share.shape[axis] != 1]
    return share.sum(axes, keepdim=True) if axes else share


# -- the table --

Builder = Callable[..., Operator]
TABLE: dict[Any, Builder] = {}
"""From a module type, a function or a tensor method's name to the builder of its operator."""

NUMBERS: set[Any] = set()
"""Those whose builders also take refs of numbers that come from a shape."""

REWRITES: dict[Any, Callable[..., Any]] = {}
"""From a module type, a function or a method's name to a function that does the same in smaller steps, each traced."""


def register(*targets: Any, numbers: bool = False) -> Callable[[Builder], Builder]:
    """Registers a builder for module types, functions (or their dotted names), or tensor methods (by name).

    The builder is called with the arguments of the call, a :class:`Ref` for each tensor that comes in; for a module
    type, with the module in front of them. It returns the operator.

    Args:
        *targets: What it is for.
        numbers: Whether the builder also takes refs of numbers that come from a shape.
    """

    def add(builder: Builder) -> Builder:
        TABLE.update(dict.fromkeys(targets, builder))
        (NUMBERS.update if numbers else NUMBERS.difference_update)(targets)
        return builder

    return add


def rewrite(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that does what a module type, a function or a method does, in steps that are known."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        REWRITES.update(dict.fromkeys(targets, function))
        return function

    return add


def find(target: Any) -> Any:
    """The key in the table for a module type (or one of its bases), a function or a method's name; None if not."""
    if isinstance(target, type):
        return next((base for base in target.__mro__ if base in TABLE), None)
    dotted = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return next((key for key in (target, dotted) if key in TABLE), None)


def refs(value: Any) -> list[Ref]:
    """The refs among some arguments, in the order in which they stand."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    return [ref for item in value for ref in refs(item)] if isinstance(value, list | tuple) else []


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of the values of the refs among some arguments, in the order in which they stand."""

    def call(*values: Any) -> Any:
        rest = iter(values)
        hollow = any(isinstance(v, Tensor) and v.is_meta for v in values)

        def fill(value: Any) -> Any:
            if isinstance(value, Ref):
                return next(rest)
            if isinstance(value, Tensor) and hollow:  # constants beside tensors without contents have none, either
                return value.to("meta")
            if isinstance(value, list | tuple):
                items = [fill(item) for item in value]
                return items if isinstance(value, list) else tuple(items)
            if isinstance(value, slice):
                return slice(fill(value.start), fill(value.stop), fill(value.step))
            return value

        filled = [fill(a) for a in args]
        named = {name: fill(a) for name, a in kwargs.items()}
        if hollow and isinstance(function, nn.Module):
            state = {name: t.to("meta") for name, t in (*function.named_parameters(), *function.named_buffers())}
            return torch.func.functional_call(function, state, tuple(filled), named)
        return function(*filled, **named)

    return call


# arithmetic on shapes

SHAPES = {
    "size", "dim", "numel", "ndimension", "nelement", "shape", "ndim", "dtype", "device", "is_cuda",
    "is_floating_point", "is_contiguous", len,
}  # fmt: skip
"""What turns a tensor into numbers: the name of a method or an attribute, or a function."""

ARITHMETIC = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, int, max, min, float,
    math.ceil, math.floor, math.prod, math.sqrt, torch._assert, operator.pow, "numel",
}  # fmt: skip
"""What may be done with such numbers."""

EMPTY = {
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like,
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip
"""What makes a new tensor of another one's shape or kind, whatever its values."""
