"""Rim: how often the highest pixel of a map misses the object, and how often it then lies at the image's rim.

    python benchmarks/rim.py imagenet/

The predicted class is explained, by ResNet-50 with Keras' weights. Before that: what becomes of even relevance on its
way through the network's strides, if all weights and activations were one.
"""

from __future__ import annotations

import argparse

import torch

import relprop
from relprop import datasets, methods
from relprop.convolution import Convolution
from relprop.memory import keep_freed
from relprop.metrics import pointing_game
from relprop.reproduction.tables import markdown
from relprop.tents import ROUNDS, Axis

STRIDES = ((1, 0, 14), (1, 0, 28), (1, 0, 56), (3, 1, 112), (7, 3, 224))
"""Kernel, padding and number of places of ResNet-50's strided maps along one axis, from the last to the first."""

METHODS = ("relprop", "ii", "grad-cam")
WIDTH = 4
BATCH = 8


def main() -> None:
    """Explains the predicted class of every image with a box or a mask in sight, and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder of images with boxes or masks")
    asked = parser.parse_args()
    print(markdown([["rounds of balancing", "pixels 1 to 4", "221 to 224"], *map(profile, (0, ROUNDS))]))
    print()
    keep_freed()
    model = relprop.load("resnet50", "keras")
    found = ((sample, sample.objects(model.preparation)) for sample in datasets.open(asked.data))
    pairs = [(sample, inside) for sample, inside in found if inside is not None and inside.any()]
    missed: dict[str, list[int]] = {name: [] for name in METHODS}
    for begin in range(0, len(pairs), BATCH):
        samples, objects = zip(*pairs[begin : begin + BATCH], strict=True)
        x = torch.stack([model.prepare(sample.picture()) for sample in samples])
        with torch.no_grad():
            target = model.module(x).argmax(1)
        for name in METHODS:
            maps = methods.get(name)(model, x, target).sum(1)
            hits = pointing_game(maps, torch.stack(objects))
            missed[name] += [rim(one) for one, hit in zip(maps, hits.tolist(), strict=True) if not hit]
    body = [[f"`{n}`", str(len(of)), str(sum(d < WIDTH for d in of)), str(len(pairs))] for n, of in missed.items()]
    print(markdown([["", "misses", f"within {WIDTH} pixels of the rim", "n"], *body]))


def profile(rounds: int) -> list[str]:
    """How bright the pixels at either end of an axis are, those in its middle being one."""
    relevance = torch.ones(7, dtype=torch.float64)
    for kernel, padding, size in STRIDES:
        ones = torch.ones(1, 1, kernel, dtype=torch.float64)
        window = Convolution(ones, None, [2], [(padding, padding)], [1], 1)
        z = Axis(window, 2, size, rounds).matrix(summed=True)
        relevance = (relevance / z.sum(1)) @ z
    ends = (relevance[:4].mean(), relevance[-4:].mean())
    return [str(rounds), *(f"{float(end / relevance[100:124].mean()):.2f}" for end in ends)]


def rim(heat: torch.Tensor) -> int:
    """How far the highest pixel is from the nearest side."""
    height, width = heat.shape
    row, column = divmod(int(heat.argmax()), width)
    return min(row, column, height - 1 - row, width - 1 - column)


if __name__ == "__main__":
    main()
