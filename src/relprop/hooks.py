"""Hooks: functions that a user, or torch itself, hangs on modules, to be called before and after their own.

torch's own (weight norm and spectral norm in their older form, pruning) compute weights, and are always run. A user's
own may just look: those are left alone while a model is traced, for they would get symbols to look at. If it turns out
that they change what the model computes, it is traced again with them as a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def prepare(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Lets torch's own hooks compute a module's weights."""
    for hook in module._forward_pre_hooks.values():
        if _is_torchs(hook):
            hook(module, args)


def names(model: nn.Module) -> list[str]:
    """The modules that have hooks of the user's own."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module._forward_hooks or not all(map(_is_torchs, module._forward_pre_hooks.values()))
    ]


def call(module: nn.Module, forward: Callable[..., Any], *args: Any, hooked: bool, **kwargs: Any) -> Any:
    """Calls what stands for a module's forward, with the user's hooks around it if they are wanted."""
    if not hooked:
        return forward(*args, **kwargs)
    for key, hook in module._forward_pre_hooks.items():
        if _is_torchs(hook):
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = args if changed is None else changed[0], kwargs if changed is None else changed[1]
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = forward(*args, **kwargs)
    for key, hook in module._forward_hooks.items():
        more = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        changed = hook(module, args, *more, result)
        result = result if changed is None else changed
    return result


def _is_torchs(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")
