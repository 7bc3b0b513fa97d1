"""A third reference: relevance as the gradient times the input of a model in which everything but its rule is frozen.

Where ``y = f(x)`` is computed as ``c g(x)`` with ``c`` a constant of the right size, gradient times input hands relevance
through it in proportion to the parts of ``g`` (Ali et al., 2022, and the efficient form of Achtibat et al., 2024). So a
model that runs under :class:`Frozen` returns its own output, and autograd does the rest: neither the graph nor any
code of relprop takes part.
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
SUMS = {"add": 1, "add_": 1, "__add__": 1, "__iadd__": 1, "__radd__": 1, "sub": -1, "__sub__": -1}


class Frozen(TorchFunctionMode):
    """Computes what a model computes, with the gradients of its rules.

    Args:
        paper: z+ and shares by magnitude, norms passed; otherwise epsilon, shares by value, norms with their factor fixed.
    """

    def __init__(self, *, paper: bool) -> None:
        super().__init__()
        self._paper = paper

    def __torch_function__(
        self, func: Callable[..., Any], _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        live = [isinstance(a, Tensor) and a.requires_grad for a in args[:2]]
        if name == "scaled_dot_product_attention":
            return self._attention(*args, **kwargs)
        if name in GATES:
            return func(*args, **kwargs).detach()
        if not any(live):
            return func(*args, **kwargs)
        if name in PASSED or (name in NORMS and self._paper):
            return as_if(args[0], func(*args, **kwargs))
        if name in NORMS and name != "batch_norm":
            return self._norm(name, *args, **kwargs)
        if name in PRODUCTS:
            return self._product(args[0], args[1])
        if name in ("__mul__", "mul", "mul_", "__imul__") and all(live):
            return (args[0] * args[1].detach() + args[0].detach() * args[1]) / 2
        if name in ("div", "__truediv__") and all(live):
            return args[0] / args[1].detach()
        if self._paper and name in MAPS:
            return self._excited(lambda a, w: func(a, w, None, *args[3:], **kwargs), args, func(*args, **kwargs))
        if self._paper and name in AVERAGES:
            z, even = (func(a, *args[1:], **kwargs) for a in (args[0].clamp(min=0), alike(args[0])))
            return as_if(z, func(*args, **kwargs), even)
        if self._paper and name in SUMS:
            return self._shared(args[0], args[1], SUMS[name])
        return func(*args, **kwargs)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: Any = None, **_: Any) -> Tensor:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        return self._product((scores if attn_mask is None else scores + attn_mask).softmax(-1).detach(), v)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        if not self._paper:
            return y
        z = a.clamp(min=0) @ b.clamp(min=0) + a.clamp(max=0) @ b.clamp(max=0)
        return as_if(z, y, alike(a) @ alike(b))

    @staticmethod
    def _excited(function: Callable[[Tensor, Tensor], Tensor], args: Sequence[Any], y: Tensor) -> Tensor:
        a, w = args[:2]
        z = function(a.clamp(min=0), w.clamp(min=0)) + function(a.clamp(max=0), w.clamp(max=0))
        return as_if(z, y, function(alike(a), torch.ones_like(w)))

    @staticmethod
    def _shared(a: Any, b: Any, sign: int) -> Tensor:
        a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
        return as_if(a * a.detach().sign() + b * b.detach().sign(), a + sign * b)

    @staticmethod
    def _norm(name: str, x: Tensor, groups: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        if name == "layer_norm":
            parts, shape = x.flatten(-len(groups)), (*groups,)
        else:
            parts, shape = x.reshape(len(x), groups, -1), (-1, *[1] * (x.ndim - 2))
        centred = parts - parts.mean(-1, keepdim=True)
        y = (centred * (parts.var(-1, unbiased=False, keepdim=True) + eps).rsqrt().detach()).reshape(x.shape)
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
