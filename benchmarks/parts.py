"""Where the time of an explanation goes: each part of `paper` beside the least that this machine could take for it.

The engine's functions are wrapped, here and only here, by a stop-watch that counts what each takes without the others.
A convolution's limit is its arithmetic at the speed of a large product of matrices; that of all else is the memory that
it reads and writes, each operand once, at the speed of a copy.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from subject import Forwards, images, in_turns, resnet
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import relprop
from relprop.dues import Due
from relprop.memory import keep_freed
from relprop.reproduction.tables import markdown

TRUE, POSITIVE, TRANSPOSED = "true convolutions", "positive convolutions", "transposed convolutions"
STATE, REST = "the state check", "all else"
PARTS = {
    TRUE: ["maps:LinearMap.__call__", "maps:LinearMap.activated"],
    "sums and pools, forward": ["operators:Operator.forward", "operators:Sum.activated"],
    POSITIVE: ["maps:LinearMap.sums"],
    TRANSPOSED: ["maps:LinearMap.shares"],
    "divisions, with the products before them": ["divisions:divide", "rules:Rule._stabilise"],
    "products by themselves": ["fused:weighed"],
    "dead units": ["maps:LinearMap.spread", "maps:LinearMap.fans"],
    "splits, likewise": ["merges:Split.__call__"],
    "other sums of the ledger": ["ledger:total", "ledger:totals"],
    "joins": ["flows:Flow.joined"],
    STATE: ["state:State.holds"],
    "checks of values": ["requests:check_input", "engine:_verify", "engine:_check_finite"],
}
"""The functions of each part; a method stands for those of all subclasses too."""
BUSY = (TRUE, POSITIVE, TRANSPOSED)


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    side: int = 224
    batch: int = 8
    rounds: int = 5
    product: int = 2048  # rows and columns of the matrices that the arithmetic's speed is taken from
    copied: int = 1 << 26  # numbers in the copy that the memory's is


QUICK = Settings(side=32, batch=2, rounds=1, product=64, copied=1 << 12)


@dataclass
class Watch:
    """Seconds and bytes by part; a part's clock stands still while another's runs."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    touched: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    within: list[str] = field(default_factory=list)
    since: float = 0.0

    def switch(self) -> None:
        """Give the time since the last switch to the part that ran."""
        now = time.perf_counter()
        if self.within:
            self.seconds[self.within[-1]] += now - self.since
        self.since = now

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, watched."""

        @wraps(function)
        def run(*args: Any, **more: Any) -> Any:
            self.switch()
            given = [v for v in (*args, *more.values()) if part == STATE or not isinstance(v, nn.Module)]
            read = {(t.data_ptr(), t._version): size(t) for t in tensors(given)}
            self.within.append(part)
            self.since = time.perf_counter()
            try:
                result = function(*args, **more)
            finally:
                self.switch()
                self.within.pop()
            if part not in self.within:  # what is inside of it has been counted
                written = {(t.data_ptr(), t._version): size(t) for t in tensors(result)}
                self.touched[part] += sum(read.values()) + sum(n for at, n in written.items() if at not in read)
            self.since = time.perf_counter()
            return result

        return run


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a function takes or returns: a model's, those in a sequence, relevance on its way."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, Due):
        yield from tensors((value.c, value.a, value.r))
    elif hasattr(value, "whole"):
        yield from tensors(value.whole)


def size(t: Tensor) -> int:
    """Bytes; of an expanded tensor, those that are there."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


@contextmanager
def watched() -> Iterator[Watch]:
    """The engine under a watch, for as long as the context lasts."""
    watch = Watch()
    changed: list[tuple[Any, str, Any]] = []
    modules = [m for name, m in sys.modules.items() if name.startswith("relprop.")]
    for part, names in PARTS.items():
        for name in names:
            place, path = name.split(":")
            *owner, last = path.split(".")
            home = importlib.import_module(f"relprop.{place}")
            if owner:
                places = [c for c in family(getattr(home, owner[0])) if last in vars(c)]
                found = [(c, last, vars(c)[last]) for c in places]
            else:  # wherever it has been imported to
                found = [(m, last, getattr(home, last)) for m in modules if vars(m).get(last) is getattr(home, last)]
            if not found:
                raise RuntimeError(f"The engine has no {name} any more; mend PARTS.")
            for where, key, function in found:
                changed.append((where, key, function))
                setattr(where, key, watch.wrapped(part, function))
    try:
        yield watch
    finally:
        for where, key, function in reversed(changed):
            setattr(where, key, function)


def family(cls: type) -> Iterator[type]:
    """A class and all that come of it."""
    yield cls
    for each in cls.__subclasses__():
        yield from family(each)


def measure(settings: Settings) -> dict[str, Any]:
    """The parts of the fastest of several explanations, and their limits."""
    keep_freed()
    model = resnet()
    x, target = images(settings.batch, settings.side)
    relprop.explain(model, x, target, preset="paper")
    runs = []
    for _ in range(settings.rounds):
        with watched() as watch:
            begin = time.perf_counter()
            relprop.explain(model, x, target, preset="paper")
            runs.append((time.perf_counter() - begin, watch))
    whole, watch = min(runs, key=lambda run: run[0])
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(x)
    flops, arithmetic, bandwidth = counter.get_total_flops(), peak_flops(settings), copy_speed(settings)
    parts = {
        name: {
            "ms": 1e3 * spent,
            "limit": 1e3 * (flops / arithmetic if name in BUSY else watch.touched[name] / bandwidth),
            "of": "arithmetic" if name in BUSY else "memory",
        }
        for name, spent in watch.seconds.items()
    }
    return {
        "batch": settings.batch,
        "side": settings.side,
        "rounds": settings.rounds,
        "ms": 1e3 * whole,
        "eager convolutions": 1e3 * eager_convolutions(model, x, settings.rounds),
        "parts": parts,
        "gflops": flops / 1e9,
        "gflops a second": arithmetic / 1e9,
        "gb a second": bandwidth / 1e9,
    }


def peak_flops(settings: Settings) -> float:
    """Operations a second of a large product of matrices."""
    n = settings.product
    a, b, c = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)
    return 2 * n**3 / in_turns({"it": lambda: torch.mm(a, b, out=c)}, 5 * settings.rounds)["it"]


def copy_speed(settings: Settings) -> float:
    """Bytes a second, read and written, of a large copy."""
    a, b = torch.rand(settings.copied), torch.empty(settings.copied)
    return 8 * settings.copied / in_turns({"it": lambda: b.copy_(a)}, 5 * settings.rounds)["it"]


def eager_convolutions(model: nn.Module, x: Tensor, rounds: int) -> float:
    """Seconds that the convolutions of the faster forward pass take."""
    found, plain = [], nn.Conv2d.forward
    for forward in Forwards(model).of(x).values():
        for _ in range(1 + rounds):
            watch = Watch()
            nn.Conv2d.forward = watch.wrapped(TRUE, plain)  # for a moment
            try:
                forward()
            finally:
                nn.Conv2d.forward = plain
            found.append(watch.seconds[TRUE])
    return min(found)


def table(data: dict[str, Any]) -> str:
    """The parts, each beside its limit."""
    lines = [["part", "ms", "%", "limit, ms", "x limit", "limit of"]]
    for name, part in data["parts"].items():
        ratio = f"{part['ms'] / part['limit']:.1f}" if part["limit"] else ""
        share = f"{100 * part['ms'] / data['ms']:.0f}"
        lines.append([name, f"{part['ms']:.1f}", share, f"{part['limit']:.1f}", ratio, part["of"]])
    rest = data["ms"] - sum(part["ms"] for part in data["parts"].values())
    lines.append([REST, f"{rest:.1f}", f"{100 * rest / data['ms']:.0f}", "", "", ""])
    lines.append(["together", f"{data['ms']:.1f}", "100", "", "", ""])
    limit = data["parts"][TRUE]["limit"]
    eager = data["eager convolutions"]
    lines.append(
        ["*an eager forward's convolutions*", f"{eager:.1f}", "", f"{limit:.1f}", f"{eager / limit:.1f}", "arithmetic"]
    )
    said = f"The fastest of {data['rounds']} explanations, batch {data['batch']}, {data['side']}x{data['side']}. "
    said += f"Arithmetic: {data['gflops']:.1f} GFLOP in each of the three kinds of convolutions, at "
    said += f"{data['gflops a second']:.0f} GFLOP a second of a large matrix product. Memory: "
    said += f"{data['gb a second']:.1f} GB a second, read and written, of a large copy."
    return f"{said}\n\n{markdown(lines)}"
