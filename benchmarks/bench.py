"""What explanations of ResNet-50 and measures of them cost in plain forward passes, and whether memory stays flat.

`make bench` runs this and prints Markdown; benchmarks/README.md says how to read it.
"""

import argparse
import copy
import datetime
import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import scoring
import torch
from torch import Tensor, nn

import relprop
from relprop.compat import import_torchvision
from relprop.memory import keep_freed

Run = Callable[[Tensor, Tensor], object]  # (images, one target an image)
BARS = {8: 3.5, 1: 3.9}  # batch size: the most forward passes that relprop may cost


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    batches: tuple[int, ...] = (8, 1)
    size: int = 224
    warmup: int = 3
    rounds: int = 10
    images: int = 300  # explained in a row for the memory table
    every: int = 50  # images between two of its lines
    threads: int = 2


QUICK = Settings(size=64, warmup=1, rounds=1, images=6, every=2)


def forward(model: nn.Module) -> Run:
    """Run the model as anyone would: eager, without gradients."""

    def run(x: Tensor, _: Tensor) -> object:
        with torch.no_grad():
            return model(x)

    return run


def gradient(model: nn.Module) -> Run:
    """One forward pass and the gradient of the target's logit at the input."""

    def run(x: Tensor, target: Tensor) -> object:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).gather(1, target[:, None]).sum(), x)

    return run


def ours(model: nn.Module) -> Run:
    """The paper's rules, ledger on."""
    return lambda x, target: relprop.explain(model, x, target=target, preset="paper")


def captum_lrp(model: nn.Module) -> Run:
    """Captum's LRP, with the epsilon rule that is its default."""
    from captum.attr import LRP

    method = LRP(own_modules(model))
    return lambda x, target: method.attribute(x.clone().requires_grad_(), target=target)


def own_modules(model: nn.Module) -> nn.Module:
    """Copy the model so that each call has a module of its own: captum raises when one ReLU is called twice."""
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    seen: set[str] = set()
    for node in traced.graph.nodes:
        if node.op == "call_module":
            if node.target in seen:
                fresh = f"{node.target}_{node.name}"
                traced.add_submodule(fresh, copy.deepcopy(traced.get_submodule(node.target)))
                node.target = fresh
            seen.add(node.target)
    for module in traced.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # captum's hooks look at a ReLU's input after it has run
    traced.recompile()
    return traced


def zennit_lrp(model: nn.Module) -> Run:
    """Zennit's EpsilonPlusFlat with the canonizer it brings for torchvision's ResNets."""
    from zennit.attribution import Gradient
    from zennit.composites import EpsilonPlusFlat
    from zennit.torchvision import ResNetCanonizer

    # Opened once and never closed, on a copy: setting up is not timed, as relprop's plan is made once too.
    attributor = Gradient(copy.deepcopy(model), EpsilonPlusFlat(canonizers=[ResNetCanonizer()]))
    attributor.__enter__()
    return lambda x, target: attributor(x, nn.functional.one_hot(target, 1000).to(x.dtype))


METHODS: dict[str, Callable[[nn.Module], Run]] = {
    "forward + input gradient": gradient,
    "**relprop** `paper`, ledger on": ours,
    "captum LRP (epsilon)": captum_lrp,
    "zennit EpsilonPlusFlat, ResNetCanonizer": zennit_lrp,
}


def seconds(run: Run, x: Tensor, target: Tensor) -> float:
    """Time one call."""
    start = time.perf_counter()
    run(x, target)
    return time.perf_counter() - start


def in_turns(baseline: Run, method: Run, x: Tensor, target: Tensor, settings: Settings) -> tuple[float, float]:
    """Return the best time of each; taking turns, both meet the same machine and the same grown allocator."""
    for _ in range(settings.warmup):
        baseline(x, target)
        method(x, target)
    times = [(seconds(baseline, x, target), seconds(method, x, target)) for _ in range(settings.rounds)]
    return min(time[0] for time in times), min(time[1] for time in times)


def cost_table(model: nn.Module, settings: Settings) -> Iterator[str]:
    """Time every method at every batch size; yield the lines of a table and then the verdicts."""
    inputs = {batch: images(batch, settings.size) for batch in settings.batches}
    plain = forward(model)
    best_plain = dict.fromkeys(settings.batches, float("inf"))
    rows: list[str] = []
    verdicts: list[str] = []
    for name, build in METHODS.items():
        cells = [name]
        method = build(model)
        for batch, (x, target) in inputs.items():
            base, best = in_turns(plain, method, x, target, settings)
            best_plain[batch] = min(best_plain[batch], base)
            cells += [f"{best * 1e3:.0f}", f"{best / base:.2f}"]
            if build is ours and batch in BARS:
                word = "not judged" if settings == QUICK else "pass" if best / base <= BARS[batch] else "miss"
                verdicts.append(f"relprop at batch {batch}: {best / base:.2f}, bar <= {BARS[batch]}: **{word}**")
        rows.append(row(cells))
        del method
        gc.collect()  # captum's hooks hold on to activations
    heads = [head for batch in settings.batches for head in (f"batch {batch}: ms", "x forward")]
    yield row(["", *heads])
    yield row(["---", *["---:"] * len(heads)])
    yield row(["plain forward", *[cell for best in best_plain.values() for cell in (f"{best * 1e3:.0f}", "1.00")]])
    yield from rows
    yield ""
    yield from (f"- {verdict}" for verdict in verdicts)


def memory_table(model: nn.Module, settings: Settings) -> Iterator[str]:
    """Explain many images one by one; growth is counted from the first line on, when every buffer has been made."""
    yield row(["images explained", "resident MB", "peak MB", "growth of the peak, MB"])
    yield row(["---:"] * 4)
    method = ours(model)
    first = 0.0
    for count in range(1, settings.images + 1):
        method(*images(1, settings.size, seed=count))
        if count % settings.every == 0:
            peak = peak_mb()
            first = first or peak
            yield row([str(count), f"{resident_mb():.0f}", f"{peak:.0f}", f"{peak - first:.1f}"])


def images(batch: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise and targets: the cost of a dense network does not depend on what it sees."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, size, size, generator=generator), torch.randint(1000, (batch,), generator=generator)


def row(cells: list[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def resident_mb() -> float:
    """What the process holds now; nan where there is no /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if statm.exists() else float("nan")


def peak_mb() -> float:
    """The most it ever held; ru_maxrss counts kilobytes on Linux and bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Print the versions and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small images, one round: does the script still run?")
    parser.add_argument("--only", choices=["memory", "cost", "metrics"], help="one part of it")
    args = parser.parse_args()
    quick, wanted = args.quick, [args.only] if args.only else ["memory", "cost", "metrics"]
    settings = QUICK if quick else Settings()

    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    model: nn.Module = import_torchvision().models.resnet50(weights=None).eval().requires_grad_(False)

    print(f"# ResNet-50, {settings.size}x{settings.size}, float32, {settings.threads} threads\n")
    if quick:
        print("A quick run: it shows that the script works, and its figures mean nothing.\n")
    packages = [f"{name} {version(name)}" for name in ("torch", "torchvision", "captum", "zennit")]
    print(f"{datetime.date.today()} · {cpu_name()} · Python {platform.python_version()} · ", end="")
    print(", ".join([f"relprop {relprop.__version__}", *packages]))
    if "memory" in wanted:  # first, while the peak is still relprop's own
        print(f"\n## Memory, {settings.images} explanations in a row at batch 1\n")
        show(memory_table(model, settings))
    if "cost" in wanted:
        print(f"\n## Cost, best of {settings.rounds} taken in turns with a plain forward pass\n")
        show(cost_table(model, settings))
    if "metrics" in wanted:
        keep_freed()  # last, and for the plain passes too: the command line does it, and everything gains from it
        chosen = scoring.QUICK if quick else scoring.Settings()
        print(f"\n## Measures, best of {chosen.rounds} taken in turns with plain forward passes in batches of 8\n")
        show(scoring.maps_table(chosen))
        show(scoring.study_lines(chosen))


def show(lines: Iterator[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
