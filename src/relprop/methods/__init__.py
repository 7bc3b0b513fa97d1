"""Methods: relprop's presets, the paper's baselines and two controls, each behind one call.

``methods.get("grad-cam")(model, x, target)`` gives attributions ``(B, C, H, W)`` like the input, or ``(B, 1, H, W)``
from a method that knows places only. Any name may end in ``+hq`` (Heat Quantization by the paper's formula) or
``+hq-released`` (by the released code's edges), with another number of levels than 8 as ``+hq16``, or in ``+sum``; such
maps are ``(B, 1, H, W)``, the channels summed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from relprop.errors import RelpropError
from relprop.heatmap import Edges
from relprop.methods import cam, captum_methods, controls, lrp, perturbation, zennit_methods
from relprop.methods.method import Method, Progress

__all__ = ["Method", "Progress", "get", "names", "register"]

_FAMILIES = (lrp, captum_methods, zennit_methods, cam, perturbation, controls)
_METHODS: dict[str, Method] = {method.name: method for family in _FAMILIES for method in family.METHODS}
_SUFFIX = re.compile(r"\+(?:sum|hq(?P<levels>[2-9]|[1-9]\d+)?(?P<released>-released)?)$")


def names() -> list[str]:
    """The names of all methods, without suffixes."""
    return list(_METHODS)


def get(name: str) -> Method:
    """Finds a method.

    Args:
        name: One of :func:`names`; with ``+hq``, ``+hq16`` or ``+hq-released`` behind it for quantized maps, with
            ``+sum`` for the sum of the channels.

    Raises:
        RelpropError: If there is none of that name.
    """
    suffix = _SUFFIX.search(name)
    bare = _SUFFIX.sub("", name)
    if bare not in _METHODS:
        near = get_close_matches(bare, _METHODS, 3, 0.5)
        hint = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(_METHODS)}"
        raise RelpropError(f"There is no method {bare!r}; {hint}.")
    method = _METHODS[bare]
    if suffix is None:
        return method
    if suffix[0] == "+sum":
        return replace(method, name=name, summed=True)
    edges: Edges = "released" if suffix["released"] else "paper"
    law = "none: every value is rounded down to one of a few levels"
    return replace(method, name=name, law=law, summed=True, edges=edges, levels=int(suffix["levels"] or 8))


def register(method: Method) -> None:
    """Adds a method of your own to those that :func:`get` finds.

    Raises:
        RelpropError: If the name is taken, or ends like a quantized or summed method's.
    """
    if method.name in _METHODS or _SUFFIX.search(method.name):
        raise RelpropError(f"The name {method.name!r} is taken; choose another one.")
    _METHODS[method.name] = method
