"""Embeddings: tables in which an input's whole numbers, such as tokens, are looked up.

A token is all that its vector was looked up with, so it gets the relevance of the whole vector, summed: nothing is
lost. Vectors that were looked up with something else than the input, such as positions, are constants, and what they
take is named where they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from relprop.errors import RelpropError
from relprop.operators import Operator, Ref, Total, register, rewrite
from relprop.rules import Handed


@dataclass(eq=False)
class Lookup(Operator):
    """Rows of a table, by their numbers."""

    table: Tensor

    def forward(self, *values: Any) -> Any:
        numbers, rows = values[0], len(self.table)
        outside = numbers[(numbers < 0) | (numbers >= rows)]
        if outside.numel():
            msg = f"{int(outside[0])} cannot be looked up in a table of {rows} rows, 0 to {rows - 1}."
            raise RelpropError(msg)
        return F.embedding(numbers, self.table)

    def shape(self, *values: Any) -> Any:
        return self.table.new_empty((*values[0].shape, self.table.shape[1]), device="meta")

    def hand(self, r: Tensor, values: Sequence[Any], total: Total) -> Handed:  # noqa: ARG002 - nothing is absorbed
        return Handed((r.sum(-1),), {})


@register(F.embedding)
def _embedding(x: Ref, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any) -> Operator:  # noqa: ARG001 - padding has a meaning in training only
    if not isinstance(weight, Tensor) or max_norm is not None:
        msg = "an embedding whose table changes"
        raise TypeError(msg)
    return Lookup("embedding", (x,), weight.detach())


@register(nn.Embedding)
def _embedding_module(m: nn.Embedding, x: Ref) -> Operator:
    return _embedding(x, m.weight, m.padding_idx, m.max_norm)


@rewrite(nn.EmbeddingBag)
def _bag(m: nn.EmbeddingBag, x: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
    """What ``nn.EmbeddingBag`` computes for bags of one size: the sum or mean of their embeddings."""
    if offsets is not None or per_sample_weights is not None or m.mode == "max" or m.padding_idx is not None:
        msg = "EmbeddingBag with offsets, weights, padding or mode='max' has no rule"
        raise TypeError(msg)
    vectors = F.embedding(x, m.weight)
    return vectors.sum(1) if m.mode == "sum" else vectors.mean(1)
