"""Twin: how well a copy of ResNet-50 in eight-bit integers scores masked images, and how fast.

    python benchmarks/twin.py imagenet/ --limit 16

The variants behind `docs/preset.md` were screened with such a copy. Its maps are the network's own.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # AMX may be announced where it must not be used

import copy
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

import relprop
from relprop import datasets, methods
from relprop.memory import keep_freed
from relprop.metrics.insertion import insertion_deletion
from relprop.metrics.scorer import Probabilities, Scorer

MAPS = ("relprop", "paper", "ii", "grad-cam")
CALIBRATION = 24
POINTS = 14


def twin(model: Any, images: Tensor) -> Probabilities:
    """The copy, calibrated on whole and masked images."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch announces where this is going to live
        from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

        torch.backends.quantized.engine = "x86"
        network = copy.deepcopy(model.module)
        observed = quantize_fx.prepare_fx(network, get_default_qconfig_mapping("x86"), (images[:1],))
        for batch in images.split(8):
            observed(batch)
            observed(batch * (torch.rand(len(batch), 1, *batch.shape[2:]) > 0.5))
        frozen = torch.jit.freeze(torch.jit.trace(quantize_fx.convert_fx(observed), images[:8]))

    def probabilities(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([frozen(part).softmax(1) for part in x.split(8)])

    return probabilities


def main() -> None:
    """Scores the same maps with both, and prints how they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder of images")
    parser.add_argument("--limit", type=int, default=16)
    asked = parser.parse_args()
    keep_freed()
    torch.manual_seed(0)
    model = relprop.load("resnet50", "keras")
    samples = datasets.open(asked.data).samples
    x = torch.stack([model.prepare(sample.picture()) for sample in samples[: asked.limit + CALIBRATION]])
    scorers = {"network": Scorer(model, x[:8], engine="frozen"), "twin": twin(model, x[asked.limit :])}
    x = x[: asked.limit]
    target = scorers["network"](x).argmax(1)
    print(
        "| map | network's ID | twin's ID | correlation | time, network / twin |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for name in MAPS:
        maps = methods.get(name)(model, x, target).sum(1)
        found, seconds = {}, {}
        for who, scorer in scorers.items():
            begin = time.perf_counter()
            found[who] = insertion_deletion(model, x, maps, target, points=POINTS, seeds=1, scorer=scorer).score.numpy()
            seconds[who] = time.perf_counter() - begin
        same = np.corrcoef(found["network"], found["twin"])[0, 1]
        means = f"{found['network'].mean():.3f} | {found['twin'].mean():.3f}"
        print(f"| {name} | {means} | {same:.3f} | {seconds['network'] / seconds['twin']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
