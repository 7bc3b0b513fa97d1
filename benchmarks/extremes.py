"""Extremes: the maps of those images on which our preset beats another method by most, and loses by most.

    python benchmarks/extremes.py imagenet/ results/preset/held-out --out docs/images/extremes.png

Photographs are left out, for ImageNet's may not be passed on: a line is drawn around what is annotated instead. With
--photos they are laid below the maps, to look at.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

import relprop
from relprop import datasets, methods
from relprop.heatmap import colorize, overlay
from relprop.study import read

OURS, RIVALS = "relprop", ("ii", "grad-cam")


def main() -> None:
    """Draws a row for each image: first the wins, then the losses, against each rival."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder of the images")
    parser.add_argument("study", type=Path, help="the folder of their study")
    parser.add_argument("--each", type=int, default=2, help="so many wins and losses against each rival")
    parser.add_argument("--photos", action="store_true", help="lay the photographs below")
    parser.add_argument("--out", type=Path, default=Path("extremes.png"))
    asked = parser.parse_args()
    scores: dict[str, dict[str, float]] = {}
    for row in read(asked.study):
        if row.metric == "insertion-deletion" and row.protocol == "tie-safe":
            scores.setdefault(row.method, {})[row.image] = row.values["score"]
    model = relprop.load("resnet50", "keras")
    samples = {sample.name: sample for sample in datasets.open(asked.data)}
    chosen = [image for rival in RIVALS for image in extremes(scores[OURS], scores[rival], asked.each)]
    figure, axes = plt.subplots(3, len(chosen), figsize=(1.7 * len(chosen), 5.6), layout="constrained", squeeze=False)
    for column, image in enumerate(chosen):
        sample = samples[image]
        photo, inside = model.crop(sample.picture()), sample.objects(model.preparation)
        x = model.prepare(sample.picture())[None]
        target = model.module(x).argmax(1)
        for axis, name in zip(axes[:, column], (OURS, *RIVALS), strict=True):
            heat = methods.get(name)(model, x, target)[0].sum(0)
            limit = float(heat.abs().quantile(0.995))
            axis.imshow(overlay(heat, photo, limit=limit) if asked.photos else colorize(heat, limit=limit))
            if inside is not None:
                axis.contour(inside, [0.5], colors="lime", linewidths=0.8)
            axis.set_title(f"{name} {scores[name][image]:.2f}" if image in scores[name] else name, fontsize=8)
            axis.axis("off")
        axes[-1, column].text(0.5, -0.1, model.classes[target], ha="center", fontsize=8, transform=axis.transAxes)
    figure.savefig(asked.out, dpi=90)


def extremes(ours: dict[str, float], theirs: dict[str, float], each: int) -> list[str]:
    """The images with the largest differences, for us first."""
    by_difference = sorted(ours.keys() & theirs.keys(), key=lambda image: theirs[image] - ours[image])
    return [*by_difference[:each], *by_difference[-each:]]


if __name__ == "__main__":
    main()
