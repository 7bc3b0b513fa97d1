"""The public names of relprop and their signatures: listed, and compared with those of the last release.

`python tests/public.py` records them in public.json, which is done when a version is released.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("public.json")


def listing() -> dict[str, str]:
    """All that ``relprop`` and its adapters offer by name, with signatures."""
    import relprop.adapters
    from relprop.compat import import_torchvision

    import_torchvision()
    found = dict(_members("relprop", relprop))
    for name in relprop.adapters.__all__:
        found |= _members(f"relprop.adapters.{name}", import_module(f"relprop.adapters.{name}"))
    return dict(sorted(found.items()))


def _members(prefix: str, module: Any) -> Iterator[tuple[str, str]]:
    for name in module.__all__:
        thing = getattr(module, name)
        yield f"{prefix}.{name}", _signature(thing)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for member, value in vars(thing).items():
                offered = not member.startswith("_") or member == "__call__"
                if offered and (isinstance(value, property | classmethod) or callable(value)):
                    yield f"{prefix}.{name}.{member}", _signature(value)


def _signature(thing: Any) -> str:
    """As it is written; for what cannot be called, its kind."""
    thing = getattr(thing, "__func__", thing)  # a class method
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return "exception"
    return str(inspect.signature(thing)) if callable(thing) else type(thing).__name__


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What has been added, removed or changed; of a class that came or went, the class alone."""
    found = dict.fromkeys(before.keys() - now.keys(), "was removed")
    found |= dict.fromkeys(now.keys() - before.keys(), "was added")
    found = {name: what for name, what in found.items() if found.get(name.rpartition(".")[0]) != what}
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            found[name] = f"was {before[name]} and is {now[name]}"
    return dict(sorted(found.items()))


def unnamed(before: Mapping[str, str], now: Mapping[str, str], changelog: str) -> list[str]:
    """The changes that the changelog's section Unreleased does not name, each as a sentence."""
    section = re.search(r"^## \[Unreleased\]$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    text = section[1] if section else ""
    return [
        f"{name} {what}; name it in CHANGELOG.md, under Unreleased, as `{name}`."
        for name, what in changes(before, now).items()
        if not re.search(rf"`{re.escape(name)}(?![\w.])", text)
    ]


if __name__ == "__main__":
    RECORD.write_text(json.dumps(listing(), indent=1) + "\n", encoding="utf-8")
