"""Loading: from the images of a piece to what a model takes, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relprop.datasets import Sample
from relprop.study.troubles import Entry, sentence

__all__ = ["Loaded", "load"]

TRIES = 2
"""How often an image is read before it is given up: a network may stumble once."""

_THREADS = 2


class Loaded(NamedTuple):
    """Images, ready for a model.

    Attributes:
        x: The inputs of those that could be read.
        samples: These; no two have the same name.
        failures: What is wrong with the others.
    """

    x: Tensor
    samples: tuple[Sample, ...]
    failures: list[Entry]


def load(model: Any, samples: Sequence[Sample]) -> Loaded:
    """Reads images; those that cannot be read, in two tries, are named and left out.

    An image that is listed twice is read once. Where two images have the same name, the second is named and left out.
    """
    named: dict[str, Sample] = {}
    doubles = [sample for sample in samples if named.setdefault(sample.name, sample) != sample]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="relprop-decode") as pool:
        read = list(zip(named.values(), pool.map(lambda sample: _read(model, sample), named.values()), strict=True))
    failures: list[Entry] = [("", x, sample.name) for sample, x in read if isinstance(x, str)]
    failures += [("", "Another image of its batch has the same name, and is measured.", s.name) for s in doubles]
    good = [(sample, x) for sample, x in read if isinstance(x, Tensor)]
    side = model.preparation.crop
    stacked = torch.stack([x for _, x in good]) if good else torch.zeros(0, 3, side, side)
    return Loaded(stacked, tuple(sample for sample, _ in good), failures)


def _read(model: Any, sample: Sample) -> Tensor | str:
    why = ""
    for _ in range(TRIES):
        try:
            x: Tensor = model.prepare(sample.picture())
            _ = sample.key
        except Exception as error:  # noqa: PERF203 - a file may be broken in ways that nobody has thought of
            why = sentence(error)
        else:
            return x
    return why
