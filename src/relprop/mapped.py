"""Mapped: operators that are linear maps of their input, for a rule to hand relevance through."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relprop.convolution import Convolution
from relprop.maps import Dense, Diagonal, LinearMap, Mean
from relprop.operators import Operator
from relprop.pools import Pool


class Mapped(Operator, ABC):
    """Anything that is a linear map of its input."""

    weighted = False
    """Whether it has learned weights that mix inputs: a convolution or a matrix."""

    clamps = True
    """Whether its weights can be parted by sign; where not, only the epsilon rule fits."""

    signal = 0
    """The position of the input that it maps; others, if any, make the map, and count as constants."""

    @property
    def heirs(self) -> tuple[int, ...]:
        return (self.signal,)

    @property
    def makers(self) -> tuple[int, ...]:
        """The positions of the inputs on whose values the map depends."""
        return ()

    @abstractmethod
    def map(self, *values: Any) -> LinearMap:
        """The map, for inputs like these."""


@dataclass(eq=False)
class Linear(Mapped):
    """A linear map with weights of its own: a convolution or a matrix."""

    linear: Convolution | Dense
    weighted = True
    _folded: dict[BatchNorm, LinearMap] = field(default_factory=dict, repr=False)

    def forward(self, *values: Any) -> Any:
        return self.linear(values[0])

    def shape(self, *values: Any) -> Any:
        return values[0].new_empty(self.linear.shape(values[0].shape))

    def folded(self, norm: BatchNorm) -> LinearMap:
        """The map with a batch norm behind it folded in, computed once."""
        if norm not in self._folded:
            assert isinstance(self.linear, Convolution | Dense)
            self._folded[norm] = self.linear.scaled(norm.scale, norm.shift)
        return self._folded[norm]

    def map(self, *values: Any) -> LinearMap:  # noqa: ARG002 - the same for every input
        return self.linear


@dataclass(eq=False)
class AveragePool(Mapped):
    """An average pool: a linear map whose matrix depends on the input's size."""

    pool: Pool

    def forward(self, *values: Any) -> Any:
        return self.pool.forward(values[0])

    def shape(self, *values: Any) -> Any:
        return values[0].new_empty(self.pool.shape(values[0].shape))

    def map(self, *values: Any) -> LinearMap:
        return self.pool.average(values[0])


@dataclass(eq=False)
class Reduction(Mapped):
    """The mean or the sum over some axes."""

    axes: tuple[int, ...]
    keep: bool
    mean: bool

    def forward(self, *values: Any) -> Any:
        return (torch.mean if self.mean else torch.sum)(values[0], self.axes, keepdim=self.keep)

    def probe(self, *values: Any) -> Tensor:
        return torch.mean(values[0], self.axes, keepdim=self.keep)

    def map(self, *values: Any) -> LinearMap:
        a = values[0]
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

    def map(self, *values: Any) -> LinearMap:
        shape = (-1, *[1] * (values[0].ndim - 2))
        return Diagonal(self.scale.reshape(shape), self.shift.reshape(shape))
