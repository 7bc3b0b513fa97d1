"""A third reference: relevance as the gradient times the input of a model in which everything but its rule is frozen.

Where ``y = f(x)`` is computed as ``c g(x)`` with ``c`` a constant of the right size, gradient times input hands
relevance through it in proportion to the parts of ``g`` (Ali et al., 2022; the efficient form of Achtibat et al.,
2024). So a model that runs under :class:`Frozen` returns its own output, and autograd does the rest: neither the graph
nor any code of relprop takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

GATES = {"softmax", "sigmoid", "sigmoid_", "hardsigmoid", "norm", "vector_norm"}
PASSED = {
    "gelu", "silu", "silu_", "hardswish", "relu", "relu_", "relu6", "leaky_relu", "elu", "mish", "hardtanh", "tanh",
    "square", "clamp", "pow", "normalize",
}  # fmt: skip
NORMS = {"layer_norm", "group_norm", "batch_norm"}
MAPS = {"linear", "conv1d", "conv2d", "conv3d"}
AVERAGES = {"mean", "sum", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool2d", "avg_pool1d", "avg_pool3d"}
PRODUCTS = {"matmul", "bmm", "__matmul__"}
SUMS = {"add", "add_", "__add__", "__iadd__", "__radd__", "sub", "__sub__"}


class Frozen(TorchFunctionMode):
    """Computes what a model computes, with the gradients of its rules.

    Args:
        paper: z+ and shares by magnitude, norms passed; otherwise epsilon, shares by value, factors of norms fixed.
    """

    def __init__(self, *, paper: bool) -> None:
        super().__init__()
        self._always = dict.fromkeys(GATES, _detached) | {"scaled_dot_product_attention": self._attention}
        self._rules = (
            dict.fromkeys(PASSED, _passed)
            | dict.fromkeys(PRODUCTS, _excited_product if paper else _plain)
            | dict.fromkeys(("mul", "mul_", "__mul__", "__imul__"), _halved)
            | dict.fromkeys(("div", "__truediv__"), _divided)
            | {"layer_norm": _layer_norm, "group_norm": _group_norm, "batch_norm": _batch_norm}
        )
        if paper:
            self._rules |= dict.fromkeys(MAPS, _excited_map) | dict.fromkeys(AVERAGES, _excited_average)
            self._rules |= dict.fromkeys(SUMS, _shared) | dict.fromkeys(NORMS, _passed)

    def __torch_function__(
        self, func: Callable[..., Any], _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        args = (*args, *(kwargs.pop(key) for key in ("input", "weight", "bias") if key in kwargs and name in MAPS))
        rule = self._always.get(name)
        if rule is None and any(_live(a) for a in args[:2]):
            rule = self._rules.get(name)
        return (rule or _plain)(func, *args, **kwargs)

    def _attention(
        self, _: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: Any = None, **__: Any
    ) -> Tensor:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1).detach()
        return self._rules["matmul"](torch.matmul, weights, v)


def _live(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _detached(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return func(*args, **kwargs).detach()


def _passed(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return as_if(x, func(x, *args, **kwargs))


def _halved(func: Any, a: Any, b: Any) -> Tensor:
    return (a * b.detach() + a.detach() * b) / 2 if _live(a) and _live(b) else func(a, b)


def _divided(func: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
    return func(a, b.detach() if isinstance(b, Tensor) else b, **kwargs)


def _excited_product(func: Any, a: Tensor, b: Tensor) -> Tensor:
    z = a.clamp(min=0) @ b.clamp(min=0) + a.clamp(max=0) @ b.clamp(max=0)
    return as_if(z, func(a, b), alike(a) @ alike(b))


def _excited_map(func: Any, a: Tensor, w: Tensor, bias: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    z, negative, even = (
        func(x, v, None, *args, **kwargs)
        for x, v in ((a.clamp(min=0), w.clamp(min=0)), (a.clamp(max=0), w.clamp(max=0)), (alike(a), torch.ones_like(w)))
    )
    return as_if(z + negative, func(a, w, bias, *args, **kwargs), even)


def _excited_average(func: Any, a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    z, even, y = (func(x, *args, **kwargs) for x in (a.clamp(min=0), alike(a), a))
    return as_if(z, y, even)


def _shared(func: Any, a: Any, b: Any) -> Tensor:
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    return as_if(a * a.detach().sign() + b * b.detach().sign(), func(a.clone(), b))


def _layer_norm(
    _: Any, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _normed(x, x.flatten(-len(shape)), tuple(shape), weight, bias, eps)


def _group_norm(_: Any, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return _normed(x, x.reshape(len(x), groups, -1), (-1, *[1] * (x.ndim - 2)), weight, bias, eps)


def _batch_norm(_: Any, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, eps: float, **__: Any) -> Tensor:
    """Written out, for torch 2.13's own gradient is wrong where its layout is not the input's."""
    shape = (-1, *[1] * (x.ndim - 2))
    factor = (var + eps).rsqrt() * (1 if weight is None else weight)
    return (x - mean.reshape(shape)) * factor.reshape(shape) + (0 if bias is None else bias.reshape(shape))


def _normed(x: Tensor, parts: Tensor, shape: tuple[int, ...], weight: Any, bias: Any, eps: float) -> Tensor:
    """Centred, times a factor that counts as a constant."""
    factor = (parts.var(-1, unbiased=False, keepdim=True) + eps).rsqrt().detach()
    y = ((parts - parts.mean(-1, keepdim=True)) * factor).reshape(x.shape)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def as_if(parts: Tensor, value: Tensor, even: Tensor | None = None) -> Tensor:
    """A value that relevance goes through as through its parts; where nothing speaks for it, as through even ones."""
    parts = parts if even is None else torch.where(parts == 0, even, parts)
    zero = parts == 0
    return parts * (value / parts.masked_fill(zero, 1)).detach() + (value * zero).detach()


def alike(a: Tensor) -> Tensor:
    """Ones, through which every element gets the same relevance, unless it is zero: such a one can get none here."""
    return a / a.detach().masked_fill(a == 0, 1)


def relevance(net: nn.Module, x: Tensor, target: int, *, paper: bool) -> tuple[Tensor, Tensor]:
    """Relevance of the input from the target's logit, and the output; the model is changed, so give one of your own."""
    net.requires_grad_(False)
    for module in net.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    x = x.clone().requires_grad_()
    with Frozen(paper=paper):
        output = net(x)
    output = output if isinstance(output, Tensor) else output["out"]
    return (x * torch.autograd.grad(output[:, target].sum(), x)[0]).detach(), output.detach()
