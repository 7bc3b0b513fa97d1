"""For mkdocstrings: docstrings have a few of Sphinx' words in them, which Markdown does not know."""

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Writes ``:func:`plan``` as code, and ``::`` before an example as one colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            text = re.sub(r":(?:func|class|meth|attr|data|mod):`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n\n", ":\n\n", text)
