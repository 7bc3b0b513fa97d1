"""Probes: measures that look at the method itself, and not at one map alone.

They ask it again, about other classes, inputs or models, or compare what it gave with what it promises. Maps have their
channels summed, as everywhere in a study, so that methods with and without channels are measured alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relprop import requests
from relprop.methods import Method
from relprop.metrics import localisation, sanity
from relprop.study.measure import Measured, Seen, numbers

__all__ = ["class_sensitivity", "conservation", "grid", "lawless", "max_sensitivity", "randomisation"]

GRID = 2
"""Images along a side of a mosaic: four of them fit into any batch of the usual size."""

NEIGHBOURS = 10
NEIGHBOURHOOD = {"radius": 0.02, "samples": NEIGHBOURS}

STEPS = 5
CASCADE = {"steps": STEPS, "kind": "spearman"}
"""How often the cascade is looked at, from the last layer alone to all of them."""


def class_sensitivity(seen: Seen) -> list[Measured]:
    """See :func:`relprop.metrics.class_sensitivity`; the predicted class has been explained already."""
    found = sanity.class_sensitivity(seen.ask, seen.model, seen.x, predicted=seen.maps)
    return numbers("class-sensitivity", found)


def max_sensitivity(seen: Seen) -> list[Measured]:
    """See :func:`relprop.metrics.max_sensitivity`."""
    settings: dict[str, Any] = NEIGHBOURHOOD
    found = sanity.max_sensitivity(seen.ask, seen.model, seen.x, seen.target, indices=seen.tickets, **settings)
    return numbers("max-sensitivity", found)


def randomisation(seen: Seen) -> list[Measured]:
    """See :func:`relprop.metrics.parameter_randomisation`; the mean over the steps, and the last, when all is random.

    The random weights are the same for every image.
    """
    settings: dict[str, Any] = CASCADE
    found = sanity.parameter_randomisation(seen.ask, seen.model, seen.x, seen.target, **settings)
    every = torch.stack(list(found.values()), 1).tolist()
    return [
        (
            {"randomisation": sum(values) / len(values), "similarity when all is random": values[-1]},
            {"similarity": [round(v, 5) for v in values]},
        )
        for values in every
    ]


# -- Conservation --

_PROMISES = {
    "sums to the probability": "probability",
    "sums to the logit": "logit",
    "sums to f(x) - f(baseline), the logits": "difference",
    "sums to one": "one",
}
"""What a law begins with, and what the attributions should add up to."""

_STARTS = {"released-mixture": "probability", "captum-lrp": "logit", "captum-lrp-mixture": "logit"}
"""LRP that does not keep what it starts with: by how much is worth knowing."""


def _promise(method: Method) -> str | None:
    bare = method.name.partition("+")[0]
    if method.edges is None and bare in _STARTS:
        return _STARTS[bare]
    return next((what for law, what in _PROMISES.items() if method.law.startswith(law)), None)


def lawless(method: Method) -> str | None:
    """Why a method has no conservation error, or None."""
    return None if _promise(method) else f"it promises no sum ({method.law})"


def conservation(seen: Seen) -> list[Measured]:
    """The sum of all attributions against what it should be: see :func:`relprop.metrics.conservation_error`.

    That is the probability or the logit of the class, what LRP starts with; one; or, for the likes of Integrated
    Gradients, the difference to the baseline's logit. It comes from the model itself, whatever scores the images.
    """
    promise, x = _promise(seen.method), seen.x
    target = seen.target[:, None]
    module = requests.module(seen.model)
    logits = sanity.output_of(module, x)
    if promise == "one":
        start = torch.ones(len(x), device=x.device)
    elif promise == "probability":
        start = logits.double().softmax(1).gather(1, target)[:, 0]
    else:
        start = logits.double().gather(1, target)[:, 0]
    if promise == "difference":
        empty = torch.full_like(x[:1], float(seen.method.options.get("baseline", 0.0)))
        start = start - sanity.output_of(module, empty).double().expand(logits.shape).gather(1, target)[:, 0]
    return numbers("conservation-error", sanity.conservation_error(seen.raw, start))


# -- The grid pointing game --


def grid(seen: Seen) -> list[Measured | str]:
    """See :func:`relprop.metrics.grid_pointing_game`: is relevance where the image is, among images of other classes?

    Every image gets a mosaic of its own, two by two, in full size, and the class that is predicted for it alone is
    explained there. Its companions are the next images of its batch, the first following the last, whose predicted
    classes differ from its own and from one another; which cell is its own depends on its content. Batches are the same
    whenever a study is run or continued, so the mosaics are, and the keys of the rows name the whole batch. In a batch
    with fewer than four predicted classes there is no game.
    """
    cells = GRID**2
    companions = [_companions(seen.target.tolist(), i, cells) for i in range(len(seen.x))]
    mine = [ticket % cells for ticket in seen.tickets]
    able = [i for i, others in enumerate(companions) if others is not None]
    result: list[Measured | str] = [f"fewer than {cells} classes are predicted in its batch"] * len(seen.x)
    for i in able:
        order = list(companions[i] or ())
        order.insert(mine[i], i)
        # One at a time: a mosaic is as large as four images.
        maps = seen.ask(seen.model, localisation.grid_images(seen.x[order], GRID), seen.target[i, None])
        share = localisation.grid_pointing_game(maps[:, 0], mine[i], GRID)
        result[i] = ({"grid-pointing-game": float(share)}, {})
    return result


def _companions(classes: Sequence[int], image: int, cells: int) -> list[int] | None:
    """The next images of other classes, one of each; None where there are not enough."""
    chosen, taken = list[int](), {classes[image]}
    for i in (*range(image + 1, len(classes)), *range(image)):
        if len(chosen) < cells - 1 and classes[i] not in taken:
            chosen.append(i)
            taken.add(classes[i])
    return chosen if len(chosen) == cells - 1 else None
