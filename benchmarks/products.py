"""Products: what convolutions with fewer of them (`relprop.winograd`) are worth, and that they cost no digits.

    python benchmarks/products.py

Kernels and explanations take turns with and without, on ResNet-50 with random weights and batches of eight. Maps, from
a start of one, are compared with those of float64.
"""

import argparse
import copy
from functools import partial
from typing import Any

import torch
from subject import SEED, THREADS, Forwards, faster, images, in_turns, resnet
from torch import Tensor, nn

import relprop
from relprop.kernels import Packed
from relprop.memory import keep_freed
from relprop.reproduction.tables import markdown
from relprop.winograd import Winograd

LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7))
"""Channels and side of the convolutions of three by three and stride one."""
PRESETS = ("paper", "relprop", "epsilon")
FITS = Winograd.fits


def main() -> None:
    """Measure, and print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="images in a batch")
    parser.add_argument("--rounds", type=int, default=8, help="turns that each takes")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    keep_freed()
    model, (x, target) = resnet(), images(args.batch)
    for rows in (kernels(args.batch, args.rounds), costs(model, x, target, args.rounds), digits(model, x, target)):
        print(markdown(rows), end="\n\n", flush=True)


def kernels(batch: int, rounds: int) -> list[list[str]]:
    """Milliseconds of single convolutions."""
    rows = [["channels, side", "plain, ms", "fewer products, ms"]]
    for channels, side in LAYERS:
        a = torch.rand(batch, channels, side, side).contiguous(memory_format=torch.channels_last)
        weight = torch.rand(channels, channels, 3, 3)
        plain = Packed(weight, None, [1, 1], [1, 1], [1, 1], 1, a.shape)
        fewer = Winograd(weight, None, [1, 1], a.shape, 2.0**-7)
        best = in_turns({"plain": partial(plain, a), "fewer": partial(fewer, a)}, 4 * rounds, 4)
        rows.append([f"{channels}, {side}", f"{1e3 * best['plain']:.2f}", f"{1e3 * best['fewer']:.2f}"])
    return rows


def explained(fewer: bool, model: nn.Module, x: Tensor, target: Tensor, **ask: Any) -> Tensor:
    """A map with or without; a model must not be asked for both, for it keeps its kernels."""
    Winograd.fits = FITS if fewer else staticmethod(lambda *_: False)  # for a moment
    try:
        return relprop.explain(model, x, target, **ask).relevance
    finally:
        Winograd.fits = FITS


def costs(model: nn.Module, x: Tensor, target: Tensor, rounds: int) -> list[list[str]]:
    """Explanations in forward passes."""
    twins = {fewer: copy.deepcopy(model) for fewer in (False, True)}
    calls = {
        (name, fewer): partial(explained, fewer, twins[fewer], x, target, preset=name)
        for name in PRESETS
        for fewer in twins
    }
    best = in_turns(Forwards(model).of(x) | calls, rounds, 2)
    rows = [["preset", "plain, x forward", "fewer products, x forward"]]
    return rows + [[f"`{n}`", *(f"{best[n, fewer] / faster(best):.2f}" for fewer in twins)] for n in PRESETS]


def digits(model: nn.Module, x: Tensor, target: Tensor) -> list[list[str]]:
    """The largest difference to the maps of float64, over the maximum of each."""
    rows = [["preset", "plain, to float64", "fewer products, to float64", "to each other"]]
    for name in PRESETS:
        ask = {"preset": name, "start": "one"}
        plain, fewer = (explained(f, copy.deepcopy(model), x, target, **ask).double() for f in (False, True))
        exact = explained(False, copy.deepcopy(model).double(), x.double(), target, **ask)
        pairs = ((plain, exact), (fewer, exact), (fewer, plain))
        rows.append([f"`{name}`", *(f"{apart(one, other):.1e}" for one, other in pairs)])
    return rows


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference between two maps of a sample, over the largest value of the second."""
    return float(((one - other).abs().flatten(1).amax(1) / other.abs().flatten(1).amax(1)).max())


if __name__ == "__main__":
    main()
