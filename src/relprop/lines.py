"""Lines: where in the model's code a node comes from."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import fx

_OURS = (Path(__file__).with_name(f"{room}.py") for room in ("trace", "tracers", "lines", "hooks", "forms", "export"))
_NOT_THE_MODEL = (f"{Path(torch.__file__).parent}{os.sep}", *map(str, _OURS))


def line() -> str | None:
    """The line of the model that is running now, written as in a traceback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    if frame is None:
        return None
    file, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    return f'  File "{file}", line {line}, in {function}\n    {linecache.getline(file, line).strip()}'


def source(n: fx.Node) -> str:
    """File, line and text of the code that a node comes from."""
    lines = (n.stack_trace or "").splitlines()
    frames = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    # torch's own frames, and ours, stand around the line of the model that did it.
    foreign = [i for i in frames if not any(place in lines[i] for place in _NOT_THE_MODEL)]
    if not foreign:
        return "unknown line"
    file, line = lines[foreign[-1]].split('"')[1], lines[foreign[-1]].split("line ")[1].split(",")[0]
    text = lines[foreign[-1] + 1].strip() if foreign[-1] + 1 not in {*frames, len(lines)} else ""
    return f"{Path(file).name}:{line}: {text}".rstrip(": ")
