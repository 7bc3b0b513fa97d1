"""Activations: functions of one element, which relevance passes unchanged.

Each output has exactly one input, so the only way to conserve relevance is to hand it all to that one. This is what LRP
has always done with a ReLU (Bach et al., 2015); for other functions it is the identity rule of Achtibat et al. (2024,
section 3.3). A softmax, or any normalising by a factor, counts as one too: the factor is taken as a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relprop.operators import Elementwise, Operator, Ref, bound, refs, register

GATES = frozenset({"sigmoid", "hardsigmoid", "softmax", "log_softmax", "tanh", "softmin", "hard_sigmoid"})
"""What the values of a gate, or of an attention, come from."""

_NONNEGATIVE = frozenset({"sigmoid", "hardsigmoid", "softmax", "exp", "square", "abs", "relu6", "softplus", "sqrt"})


def activation(label: str, function: Callable[..., Tensor], x: Ref, *args: Any, **kwargs: Any) -> Operator:
    """A function of one tensor, never in place; other arguments are numbers or constants."""
    if not isinstance(x, Ref):
        msg = f"{label} of a constant"
        raise TypeError(msg)
    kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
    inputs = tuple(refs(((x, *args), kwargs)))
    return Elementwise(label, inputs, bound(function, (x, *args), kwargs), label in _NONNEGATIVE)


def _module(
    label: str, function: Callable[..., Tensor], settings: tuple[str, ...], module: nn.Module, x: Ref
) -> Operator:
    values = {name: getattr(module, name) for name in settings}
    return activation(label, function, x, **{k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()})


_MODULES: dict[type[nn.Module], tuple[str, Callable[..., Tensor], tuple[str, ...]]] = {
    nn.GELU: ("gelu", F.gelu, ("approximate",)),
    nn.SiLU: ("silu", F.silu, ()),
    nn.Mish: ("mish", F.mish, ()),
    nn.Hardswish: ("hardswish", F.hardswish, ()),
    nn.Hardsigmoid: ("hardsigmoid", F.hardsigmoid, ()),
    nn.Sigmoid: ("sigmoid", torch.sigmoid, ()),
    nn.Tanh: ("tanh", torch.tanh, ()),
    nn.ELU: ("elu", F.elu, ("alpha",)),
    nn.CELU: ("celu", F.celu, ("alpha",)),
    nn.SELU: ("selu", F.selu, ()),
    nn.PReLU: ("prelu", F.prelu, ("weight",)),
    nn.Softplus: ("softplus", F.softplus, ("beta", "threshold")),
    nn.Softsign: ("softsign", F.softsign, ()),
    nn.Hardtanh: ("hardtanh", F.hardtanh, ("min_val", "max_val")),
    nn.LogSigmoid: ("logsigmoid", F.logsigmoid, ()),
    nn.Softmax: ("softmax", F.softmax, ("dim",)),
    nn.LogSoftmax: ("log_softmax", F.log_softmax, ("dim",)),
    nn.Softmin: ("softmin", F.softmin, ("dim",)),
    nn.LocalResponseNorm: ("local_response_norm", F.local_response_norm, ("size", "alpha", "beta", "k")),
}
for _type, _facts in _MODULES.items():
    register(_type)(partial(_module, *_facts))

for _name in (
    "gelu", "silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "elu", "celu", "selu", "prelu", "softplus",
    "softsign", "hardtanh", "logsigmoid", "softmax", "log_softmax", "softmin", "local_response_norm", "normalize",
    "threshold",
):  # fmt: skip
    register(getattr(F, _name))(partial(activation, _name, getattr(F, _name)))
    if hasattr(F, f"{_name}_"):
        register(getattr(F, f"{_name}_"))(partial(activation, _name, getattr(F, _name)))
for _name in (
    "sigmoid", "tanh", "softmax", "log_softmax", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "abs",
    "pow", "clamp", "clamp_min", "clamp_max", "clip", "erf", "sin", "cos", "reciprocal", "float_power", "celu", "selu",
    "prelu", "nan_to_num",
):  # fmt: skip
    _function = getattr(torch, _name)
    _targets = [t for t in (_name, f"{_name}_") if hasattr(Tensor, t)]
    register(_function, *_targets, *([getattr(torch, f"{_name}_")] if hasattr(torch, f"{_name}_") else []))(
        partial(activation, _name, _function)
    )
register(operator.pow, numbers=True)(partial(activation, "pow", torch.pow))


class Converted(Elementwise):
    """The same values as numbers of another kind."""

    def shape(self, *values: Any) -> Any:
        try:
            after = self.function(*values)
        except (RuntimeError, NotImplementedError):  # to another device, which has no place for what has no contents
            return values[0]
        return after if after.is_meta else values[0]


def _converted(name: str, x: Ref, *args: Any, **kwargs: Any) -> Operator:
    inputs, call = tuple(refs(((x, *args), kwargs))), bound(getattr(Tensor, name), (x, *args), kwargs)
    return Converted(name, inputs, call, nonnegative=None, identity=True)


for _name in ("float", "double", "type", "type_as", "to", "bool", "long", "int"):
    register(_name, numbers=True)(partial(_converted, _name))


@register("torchvision.ops.stochastic_depth.stochastic_depth")
def _stochastic_depth(x: Ref, p: float, mode: str, training: bool = True) -> Operator:  # noqa: ARG001 - as it is called
    if training:
        msg = "drops at random here"
        raise TypeError(msg)
    return Elementwise("stochastic_depth", (x,), lambda value: value, None, identity=True, alias=True)
