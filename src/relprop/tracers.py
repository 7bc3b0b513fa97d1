"""Tracers: they run a model's code with symbols, and write down what it does with them."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from relprop import forms, hooks, operators
from relprop.forms import Form
from relprop.graph import Call
from relprop.lines import line
from relprop.recording import attribute, evaluate, is_wrapped


class _Proxy(fx.Proxy):
    """A symbolic value that tells ``h += y``, which writes into ``h``, from ``h = h + y``."""

    def __getattr__(self, name: str) -> Any:
        if name in ("T", "mT", "data"):  # written down here, where it is read, and not where it is used
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class Tracer(fx.Tracer):
    """Records, with each node, the calls of modules around it and its line; leaves other threads alone."""

    def __init__(self, form: Form | None = None, hooked: bool = False) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type] # a tuple of none is one, too
        self._form, self._hooked = form, hooked
        self._preparing = False
        self.around: dict[fx.Node, tuple[Call, ...]] = {}
        self._stack: tuple[Call, ...] = ()
        self._counts: dict[str, int] = {}
        self.kinds: dict[str, type[nn.Module]] = {}
        # While fx traces, it looks at every call of every module in the process. Those of other threads are none of
        # its business.
        self._thread = threading.get_ident()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:  # noqa: ARG002 - fx's
        """Calls the model in its form, with symbols for the tensors, and takes what is meant of what it returns."""
        root = self.root
        form = self._form or forms.plain(root)
        symbols = [self.create_proxy("placeholder", name, (), {}) for name in form.names]

        def run(*values: Any) -> Any:
            return form.answer(form.call(partial(hooks.call, root, root.forward, hooked=self._hooked), values))

        return run, symbols

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        m = getattr(m, "_orig_mod", m)  # what torch.compile has compiled
        name = self.path_of_module(m).replace("._orig_mod", "")
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        self.kinds[name] = type(m)
        outside = self._stack
        self._stack = (*outside, (name, count))
        try:
            self._preparing = True
            hooks.prepare(m, args)
            self._preparing = False

            def inner(*args: Any, **kwargs: Any) -> Any:
                if type(m) in operators.REWRITES:
                    return operators.REWRITES[type(m)](m, *args, **kwargs)
                return super(Tracer, self).call_module(m, m.forward, args, kwargs)

            return hooks.call(m, inner, *args, hooked=self._hooked, **kwargs)
        finally:
            self._stack = outside
            self._preparing = False

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind in ("call_function", "call_method") and target in operators.REWRITES:
            return operators.REWRITES[target](*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *rest, **options)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self._preparing or threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in operators.TABLE or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.around[node] = self._stack
        node.stack_trace = line()  # fx would do it, but has to load torch's compiler for that
        return node


class _ShapedProxy(_Proxy):
    """A symbolic tensor that knows what it stands for: shapes are plain numbers, and code may branch on them."""

    def __getattr__(self, name: str) -> Any:
        tracer = self.tracer
        assert isinstance(tracer, ShapedTracer)
        value = tracer.values[self.node] if name not in ("device", "is_meta", "is_cuda") else tracer.tensors[0]
        value = getattr(value, name)
        if isinstance(value, Tensor):
            return tracer.create_proxy("call_function", getattr, (self, name), {})
        return fx.proxy.Attribute(self, name) if callable(value) and not isinstance(value, type) else value

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Any:
        return (self[k] for k in range(len(self)))  # type: ignore[index] # fx adds it

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    @property
    def _value(self) -> Tensor:
        tracer = self.tracer
        assert isinstance(tracer, ShapedTracer)
        value: Tensor = tracer.values[self.node]
        return value


class ShapedTracer(Tracer):
    """Computes as it records, so that every size is known; looks into functions that were wrapped to hide them."""

    def __init__(self, form: Form, hooked: bool, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        super().__init__(form, hooked)
        self.values: dict[fx.Node, Any] = {}
        self._model, self.tensors = model, tensors
        self._computing = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapedProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:  # noqa: ARG002 - fx's
        return attr_val  # weights are what they are: what is computed of them alone needs no recording

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind == "call_function" and is_wrapped(target):
            return _marked(target(*args, **kwargs))
        if kind in ("call_function", "call_method") and target in operators.REWRITES:
            return operators.REWRITES[target](*args, **kwargs)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        value = self.values[proxy.node] = self._computed(proxy.node)
        if isinstance(value, Tensor) or kind == "placeholder":
            return proxy
        if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
            return [self.create_proxy("call_function", operator.getitem, (proxy, k), {}) for k in range(len(value))]
        return value

    def _value(self, n: fx.Node) -> Any:
        if n not in self.values:  # a constant tensor, which fx hangs on the model
            self.values[n] = self._computed(n)
        return self.values[n]

    def _computed(self, n: fx.Node) -> Any:
        """The value of a node, without contents: code that branches on more than shapes finds nothing to look at."""
        if n.op == "placeholder":
            before = sum(k.op == "placeholder" for k in self.values)
            return torch.empty_like(self.tensors[before], device="meta")
        if n.op == "get_attr":
            value = attribute(self._model, str(n.target))
            return value.to("meta") if isinstance(value, Tensor) else value
        args: Any = fx.map_arg(n.args, self._value)
        kwargs: Any = fx.map_arg(n.kwargs, self._value)
        if n.op == "call_module":
            module = self._model.get_submodule(str(n.target))
            state = {name: t.to("meta") for name, t in (*module.named_parameters(), *module.named_buffers())}
            self._computing = True
            try:
                return torch.func.functional_call(module, state, args, kwargs)
            finally:
                self._computing = False
        return evaluate(n, None, args, kwargs)


class _Marked(tuple[Any, ...]):
    """What a wrapped function returned, with a node for fx to leave its mark on."""

    node: fx.Node


def _marked(returned: Any) -> Any:
    if not isinstance(returned, list | tuple) or not any(isinstance(r, fx.Proxy) for r in returned):
        return returned
    marked = _Marked(returned)
    marked.node = next(r.node for r in returned if isinstance(r, fx.Proxy))
    return marked
