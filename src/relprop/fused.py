"""Fused: elementwise steps of the way back in one pass over memory, compiled where there is a C compiler.

torch takes a pass over memory for every step, and one more for every sum. The few functions of ``fused.c`` take one for
all; values are the same to the last bit, sums within rounding. They are compiled once, in two seconds, into the cache,
with the convolutions of :mod:`relprop.winograd`; without a compiler, or with ``RELPROP_COMPILER`` set to nothing, torch
does it step by step.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from relprop.cache import folder
from relprop.dues import Due, memory
from relprop.tiles import tileable

_SOURCES = [Path(__file__).with_name(name) for name in ("fused.c", "winograd.c")]
_FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
_WIDE = {"AVX512": ["-mavx512f", "-mfma"], "AVX2": ["-mavx2", "-mfma"]}  # where torch's own kernels have it
_CHUNK = 1 << 14
_SECONDS = 60
_OPENMP = "libgomp.so.1"
"""With another OpenMP than torch's, two sets of threads would wait for the same processors."""


class _Work(ctypes.Structure):
    """What a step reads and writes, as ``fused.c`` has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("r", "c", "a", "one", "two", "x", "y", "eps", "bias", "sums")),
        *((name, ctypes.c_int64) for name in ("channels", "targets", "samples", "size", "chunks")),
        ("threshold", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


def fits(*values: Tensor, r: Tensor | Due) -> bool:
    """Whether the functions below take values ``(B, ...)`` and relevance ``(T, B, ...)``, and are there."""
    r = memory(r)  # what is due with it fits it
    if r.dtype != torch.float32 or any(v.dtype != torch.float32 for v in values) or not tileable(*values, r[0]):
        return False
    packed = len(r) == 1 or r.stride(0) == r[0].numel()
    return packed and r.numel() > 0 and library() is not None


def split_by_magnitude(a: Tensor, b: Tensor, r: Tensor | Due, x: Tensor, y: Tensor) -> Tensor:
    """Writes ``x = |a| / (|a| + |b|) r``, halves for 0/0, and ``y = r - x``.

    Returns:
        The sums of ``x``, ``y`` and of their magnitudes, ``(4, T, B)``.
    """
    return _call("split_by_magnitude", 7, r, one=a, two=b, x=x, y=y)[2:6]


def split_by_value(a: Tensor, b: Tensor, r: Tensor | Due, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Writes ``x = a s`` and ``y = b s`` with ``s = r / (a + b + eps sign(a + b))``.

    Returns:
        The sums of ``x``, ``y``, of their magnitudes, and of what ``eps`` takes, ``(5, T, B)``.
    """
    return _call("split_by_value", 7, r, one=a, two=b, x=x, y=y, threshold=eps)[2:]


def divide(r: Tensor | Due, z: Tensor, s: Tensor, threshold: float) -> bool:
    """Writes ``s = r / z``, zero where ``|z|`` is not above a threshold; ``s`` may be ``z`` for one target.

    Returns:
        Whether there is relevance at such places.
    """
    return bool(_call("divide", 3, r, one=z, x=s, threshold=threshold)[2].any())


def steady(r: Tensor | Due, z: Tensor, s: Tensor, eps: Tensor, bias: Tensor | None) -> Tensor:
    """Writes ``s = r / (z + eps sign(z))``.

    Args:
        r: What is divided.
        z: What it is divided by.
        s: Where it is written; may be ``z`` for one target.
        eps: One number, or one a sample.
        bias: One value a channel, where the channels are neighbours in memory.

    Returns:
        The sums of what ``eps`` takes, and of ``s`` times the bias, ``(2, T, B)``.
    """
    each = eps.flatten().expand(len(z)).contiguous()
    flat = None if bias is None else bias.flatten().contiguous()
    return _call("steady", 4, r, one=z, x=s, eps=each, bias=flat, channels=0 if flat is None else len(flat))[2:]


def taken(r: Tensor | Due) -> Tensor:
    """Relevance, with the product taken if one is due."""
    return r if isinstance(r, Tensor) else weighed(r)


def weighed(r: Due) -> Tensor:
    """Takes a product by itself, in place."""
    _call("weigh", 2, r, x=r.c)
    return r.c


def measure(r: Tensor) -> Tensor:
    """The sums of relevance and of its magnitudes, ``(2, T, B)``."""
    return _call("measure", 2, r)


def winners(a: Tensor, y: Tensor, r: Tensor, windows: Sequence[Sequence[int]]) -> Tensor | None:
    """Hands relevance of a max pool's windows to their largest inputs, evenly among those that tie.

    Args:
        a: Input of the pool, ``(B, C, height, width)``.
        y: Its output.
        r: Relevance of the output, ``(T, B, C, ...)``.
        windows: Their kernel, stride, padding and dilation, on both axes each.

    Returns:
        Relevance of the input; None where it has to be done otherwise.
    """
    last = torch.channels_last
    beside = a.ndim == 4 and len(windows[0]) == 2 and all(v.is_contiguous(memory_format=last) for v in (a, y, r[0]))
    if not beside or a.dtype != torch.float32 or not fits(y, r=r):
        return None
    x = torch.empty((len(r) * len(a), *a.shape[1:]), dtype=a.dtype, device=a.device, memory_format=last)
    room = torch.empty_like(r)
    pairs = [n for pair in (a.shape[2:], y.shape[2:], *windows) for n in pair]
    pointers = [ctypes.c_void_p(v.data_ptr()) for v in (a, y, r, room, x)]
    sizes = [ctypes.c_int64(n) for n in (*r.shape[:2], a.shape[1])]
    compiled = library()
    assert compiled is not None
    compiled.winners(*pointers, *sizes, (ctypes.c_int64 * len(pairs))(*pairs), ctypes.c_int(torch.get_num_threads()))
    result: Tensor = x.unflatten(0, r.shape[:2])
    return result


def _call(name: str, kinds: int, r: Tensor | Due, **more: Tensor | float | None) -> Tensor:
    """Calls a function; returns its sums, ``(kinds, T, B)``, of which the first two are those of a product."""
    compiled = library()
    assert compiled is not None
    parts = {"r": r.r, "c": r.c, "a": r.a} if isinstance(r, Due) else {"r": r}
    targets, samples = memory(r).shape[:2]
    wanted, size = kinds * targets * samples, memory(r).numel() // (targets * samples)
    chunks = -(-size // _CHUNK)
    room = torch.empty(wanted * chunks, dtype=torch.float64, device="cpu")
    given = {**parts, **more, "sums": room}
    work = _Work(**{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in given.items()})
    work.targets, work.samples, work.size, work.chunks = targets, samples, size, chunks
    work.threads = torch.get_num_threads()
    getattr(compiled, name)(ctypes.byref(work))
    sums = room[:wanted].reshape(kinds, targets, samples)
    if isinstance(r, Due):
        r.sums = sums[0], sums[1]
    return sums


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they cannot be had."""
    compiler = shutil.which(os.environ.get("RELPROP_COMPILER", "cc"))
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    wide = _WIDE.get(torch.backends.cpu.get_cpu_capability(), [])
    try:
        ctypes.CDLL(_OPENMP, mode=os.RTLD_NOLOAD)  # torch has it
        compiled = ctypes.CDLL(str(_built([compiler, *_FLAGS, *wide])))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # of these, the second where there is no home
        return None
    if wide:
        compiled.winograd_room.restype = ctypes.c_int64
    return compiled


def _built(command: Sequence[str]) -> Path:
    """The shared library in the cache, made first if it is not there.

    Raises:
        OSError: The cache cannot be written, or what is there could be somebody else's.
        SubprocessError: The compiler failed.
    """
    whole = b"".join(source.read_bytes() for source in _SOURCES) + " ".join(command).encode()
    key = hashlib.sha256(whole).hexdigest()[:16]
    path = folder().absolute() / f"fused-{os.uname().machine}-{os.getuid()}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fused-", dir=path.parent, ignore_cleanup_errors=True) as work:
            made = Path(work) / path.name
            subprocess.run(
                [*command, *map(str, _SOURCES), "-o", str(made)], check=True, capture_output=True, timeout=_SECONDS
            )
            made.chmod(0o700)
            made.replace(path)
    for about in (path.stat(), path.parent.stat()):
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError(path)
    if _OPENMP.encode() not in path.read_bytes():
        raise OSError(f"{path} was not linked with {_OPENMP}")
    return path
