"""relprop as Quantus' ``explain_func``, for its metrics and for ``quantus.evaluate``.

```python
import quantus
from relprop.adapters.quantus import explain_func

scores = quantus.evaluate(
    metrics={"sparseness": quantus.Sparseness(), "max-sensitivity": quantus.MaxSensitivity(nr_samples=5)},
    xai_methods={"paper": explain_func, "epsilon": explain_func},       # a preset's name chooses it
    model=model, x_batch=x, y_batch=y,                                  # numpy arrays
    explain_func_kwargs={},
)
```
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relprop import requests
from relprop.engine import explain
from relprop.presets import PRESETS

__all__ = ["explain_func"]


def explain_func(
    model: Any,
    inputs: Any,
    targets: Any,
    *,
    method: str | None = None,
    device: Any = None,  # noqa: ARG001 - Quantus hands it on to all; what counts is where the model is
    **options: Any,
) -> npt.NDArray[Any]:
    """Explains a batch of images as Quantus asks for it.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        inputs: The batch, ``(B, C, ...)``: an array or a tensor, of any precision.
        targets: One class an input.
        method: The label under which ``quantus.evaluate`` keeps the scores. Where it is the name of a preset and
            ``preset`` is not among the options, it chooses that one; any other is nothing but a label.
        device: Not looked at: the inputs go to where the model is.
        **options: Passed to :func:`relprop.explain`: ``preset``, ``split``, ``start``, ``overrides`` ...

    Returns:
        Relevance summed over the channels, ``(B, 1, ...)``, as ``quantus.explain`` gives it; like the inputs where
        they are features, ``(B, F)``.

    Raises:
        RelpropError: If the request cannot be met.
    """
    module = requests.module(model, halves=True)
    like = requests.like(module, torch.zeros(()))
    x = (inputs if isinstance(inputs, Tensor) else torch.as_tensor(np.asarray(inputs))).to(like.device, like.dtype)
    classes = torch.as_tensor(np.asarray(targets)).long().reshape(-1)
    if method in PRESETS:
        options = {"preset": method, **options}
    heatmap: Tensor = explain(model, x, classes, **options).heatmap
    array: npt.NDArray[Any] = (heatmap.unsqueeze(1) if x.ndim > 2 else heatmap).float().cpu().numpy()
    return array
