"""Attention: products of matrices that the input decides about.

``softmax(q k / sqrt(d)) v`` mixes the values ``v`` with weights that count as constants: all relevance goes to the
values, through the plan's rule for matrices, and none to queries, keys and masks (Ali et al., 2022: conservative
propagation). Weights of a softmax are not negative and sum to one, so nothing is lost. Other products of two matrices
are treated alike once :mod:`relprop.gates` has found which of the two is the signal.

References:
    Ali et al., 2022: XAI for Transformers: Better Explanations through Conservative Propagation.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.mapped import Mapped
from relprop.maps import LinearMap
from relprop.operators import Operator, Ref, bound, reduced, refs, register, rewrite


class Mixing(LinearMap):
    """A product with a tensor of each sample's own.

    Args:
        weight: That tensor.
        items: The length of the first axis of the map's input and output.
        forward: From input and weight to output.
        backward: From output and weight to input, up to axes along which either was broadcast.
    """

    def __init__(
        self,
        weight: Tensor,
        items: int,
        forward: Callable[[Tensor, Tensor], Tensor],
        backward: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(weight)
        self._items, self._forward, self._backward = items, forward, backward

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return self._forward(a, weight)

    def transpose(self, s: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        # Several targets share the weights of one sample.
        back = self._backward(s.unflatten(0, (-1, self._items)), weight)
        return reduced(back, (self._items, *shape)).flatten(0, 1)

    def spread(self, s: Tensor, shape: Sequence[int]) -> Tensor:
        return self.transpose(s, self._connected(shape), shape)

    def fan(self, shape: Sequence[int]) -> Tensor:
        return self.apply(self.weight.new_ones((1, *shape)), self._connected(shape))

    def _connected(self, shape: Sequence[int]) -> Tensor:
        """Ones where there is a weight: what attention masks is no input. All ones if an output had none then."""
        real = (self.weight != 0).to(self.weight.dtype)
        seen = self.apply(self.weight.new_ones((1, *shape)), real)
        return real if bool(seen.all()) else torch.ones_like(real)


class Matrices(Mapped):
    """A product of two tensors over some of their axes.

    Attributes:
        signals: Positions of the inputs that get relevance.
    """

    signals: tuple[int, ...]

    @property
    def signal(self) -> int:  # type: ignore[override] # told by the graph, here
        return self.signals[0]

    @property
    def heirs(self) -> tuple[int, ...]:
        return self.signals

    @property
    def makers(self) -> tuple[int, ...]:
        return tuple(range(len(self.inputs)))

    def map(self, *values: Any) -> LinearMap:
        return self.map_of(self.signal, *values)

    @abstractmethod
    def map_of(self, signal: int, *values: Any) -> LinearMap:
        """The map of one of the inputs, with the others as they are."""


def _turned(t: Tensor) -> Tensor:
    return t.transpose(-1, -2)


@dataclass(eq=False)
class Matmul(Matrices):
    """``a @ b``, of more than two axes perhaps."""

    signals: tuple[int, ...] = (0, 1)

    def forward(self, *values: Any) -> Any:
        return torch.matmul(*values)

    def map_of(self, signal: int, *values: Any) -> LinearMap:
        items = max(len(v) for v in values)
        if signal == 1:
            return Mixing(values[0], items, lambda a, w: w @ a, lambda s, w: _turned(w) @ s)
        return Mixing(values[1], items, lambda a, w: a @ w, lambda s, w: s @ _turned(w))


@dataclass(eq=False)
class Einsum(Matrices):
    """``torch.einsum`` of two tensors."""

    equation: str
    signals: tuple[int, ...] = (0, 1)

    def forward(self, *values: Any) -> Any:
        return torch.einsum(self.equation, *values)

    def probe(self, *values: Any) -> Tensor:
        ones = [torch.ones_like(v) for v in values]
        known = next(k for k, v in enumerate(values) if not v.isnan().all())
        one = [v if k == known else o for k, (v, o) in enumerate(zip(values, ones, strict=True))]
        return torch.einsum(self.equation, *one) / torch.einsum(self.equation, *ones)

    def map_of(self, signal: int, *values: Any) -> LinearMap:
        terms, result = self.equation.replace(" ", "").split("->")
        a, w = (terms.split(",")[k] for k in (signal, 1 - signal))
        target = next(c for c in "TUVWXYZ" if c not in self.equation)  # one more axis, for several targets
        back = f"{target}{result},{w}->{target}{a}"
        return Mixing(
            values[1 - signal],
            len(values[signal]),
            lambda x, weight: torch.einsum(f"{a},{w}->{result}", x, weight),
            lambda s, weight: torch.einsum(back, s, weight),
        )


@dataclass(eq=False)
class Attention(Matrices):
    """Scaled dot product attention: the values are the signal."""

    function: Callable[..., Tensor]
    weights: Callable[..., Tensor]
    signals: tuple[int, ...] = (2,)

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def probe(self, *values: Any) -> Tensor:
        q, _, v = values[:3]
        return v[..., :1, :1].expand(*v.shape[:-2], q.shape[-2], v.shape[-1])  # type: ignore[no-any-return] # a tensor

    def map_of(self, signal: int, *values: Any) -> LinearMap:  # noqa: ARG002 - there is but one
        weight = self.weights(*values)
        return Mixing(weight, len(values[2]), lambda a, w: w @ a, lambda s, w: _turned(w) @ s)


@register(operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__")
def _matmul(a: Any, b: Any = None, *, other: Any = None, mat2: Any = None) -> Operator:
    b = next(t for t in (b, other, mat2) if t is not None)
    if isinstance(a, Ref) and isinstance(b, Ref):
        return Matmul("matmul", (a, b))
    return Fixed("matmul", tuple(refs((a, b))), a, b)


@dataclass(eq=False)
class Fixed(Mapped):
    """A product with a constant matrix."""

    left: Any
    right: Any
    weighted = True

    def forward(self, *values: Any) -> Any:
        return torch.matmul(*self._filled(values[0]))

    def shape(self, *values: Any) -> Any:
        return torch.matmul(*(t.to("meta") for t in self._filled(values[0])))

    def _filled(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return (value, self.right) if isinstance(self.left, Ref) else (self.left, value)

    def map(self, *values: Any) -> LinearMap:
        if isinstance(self.left, Ref):
            return Mixing(self.right, len(values[0]), lambda a, w: a @ w, lambda s, w: s @ _turned(w))
        return Mixing(self.left, len(values[0]), lambda a, w: w @ a, lambda s, w: _turned(w) @ s)


@register(torch.einsum, torch.functional.einsum)
def _einsum(equation: str, *operands: Any) -> Operator:
    pair = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    if len(pair) != 2 or "->" not in equation:
        msg = "einsum of two tensors with -> only"
        raise TypeError(msg)
    terms, result = equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    if not set(left) <= set(right + result) or not set(right) <= set(left + result):
        msg = "einsum that sums one of its tensors alone"
        raise TypeError(msg)
    if all(isinstance(t, Ref) for t in pair):
        return Einsum("einsum", tuple(pair), equation)
    signal = 0 if isinstance(pair[0], Ref) else 1
    return ConstantEinsum("einsum", (pair[signal],), equation, pair[1 - signal], signal)


@dataclass(eq=False)
class ConstantEinsum(Mapped):
    """``torch.einsum`` with a constant tensor, such as a learned weight."""

    equation: str
    constant: Tensor
    position: int
    weighted = True

    def _pair(self, value: Tensor) -> list[Tensor]:
        constant = self.constant.to("meta") if value.is_meta else self.constant
        return [value, constant] if self.position == 0 else [constant, value]

    def forward(self, *values: Any) -> Any:
        return torch.einsum(self.equation, *self._pair(values[0]))

    def probe(self, *values: Any) -> Tensor:
        constant = torch.ones_like(self.constant, dtype=torch.float64)
        pairs = [
            [v, constant] if self.position == 0 else [constant, v] for v in (values[0], torch.ones_like(values[0]))
        ]
        return torch.einsum(self.equation, *pairs[0]) / torch.einsum(self.equation, *pairs[1])

    def map(self, *values: Any) -> LinearMap:
        pair = self._pair(values[0])
        return Einsum("einsum", self.inputs, self.equation).map_of(self.position, *pair)


@register(F.scaled_dot_product_attention)
def _attention(
    query: Ref,
    key: Ref,
    value: Ref,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Operator:
    if enable_gqa or dropout_p or not all(isinstance(t, Ref) for t in (query, key, value)):
        msg = "attention that drops at random or shares heads"
        raise TypeError(msg)
    args = (query, key, value, attn_mask)
    options = {"is_causal": is_causal, "scale": scale}
    call = bound(F.scaled_dot_product_attention, args, options)
    return Attention("attention", tuple(refs(args)), call, bound(_weights, args, options))


def _weights(q: Tensor, k: Tensor, _: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """The weights of scaled dot product attention, as torch documents them."""
    scores = q @ _turned(k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


@rewrite(torch.addmm, torch.baddbmm, "addmm", "baddbmm")
def _addmm(x: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = torch.matmul(left, right)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


# -- torch's own attention, in smaller steps --


@rewrite(nn.MultiheadAttention)
def _multihead(
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,  # noqa: ARG001 - they are not a signal
    attn_mask: Any = None,
    average_attn_weights: bool = True,  # noqa: ARG001 - as above
    is_causal: bool = False,  # noqa: ARG001 - a hint; the mask says it
) -> tuple[Any, None]:
    """What ``nn.MultiheadAttention`` computes for a batch, one projection after another."""
    if key_padding_mask is not None or module.bias_k is not None or module.add_zero_attn:
        msg = "MultiheadAttention with key_padding_mask, add_bias_kv or add_zero_attn has no rule"
        raise TypeError(msg)
    width = module.embed_dim
    if module._qkv_same_embed_dim:
        packed = module.in_proj_weight
        weights = [packed[k * width : (k + 1) * width] for k in range(3)]
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    shift = module.in_proj_bias
    biases = [None if shift is None else shift[k * width : (k + 1) * width] for k in range(3)]
    order = (query, key, value) if module.batch_first else tuple(t.transpose(0, 1) for t in (query, key, value))
    q, k, v = (
        F.linear(t, w, b).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for t, w, b in zip(order, weights, biases, strict=True)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask).transpose(1, 2).flatten(2)
    result = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    return (result if module.batch_first else result.transpose(0, 1)), None


@rewrite(nn.TransformerEncoderLayer)
def _encoder_layer(
    module: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,  # noqa: ARG001 - a hint; the mask says it
) -> Any:
    """What ``nn.TransformerEncoderLayer`` computes, without its fast path."""

    def attend(x: Any) -> Any:
        return module.dropout1(module.self_attn(x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask)[0])

    def feed(x: Any) -> Any:
        return module.dropout2(module.linear2(module.dropout(module.activation(module.linear1(x)))))

    if module.norm_first:
        x = src + attend(module.norm1(src))
        return x + feed(module.norm2(x))
    x = module.norm1(src + attend(src))
    return module.norm2(x + feed(x))
