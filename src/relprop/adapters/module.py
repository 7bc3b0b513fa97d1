"""Explaining as an ``nn.Module``, for what is built of modules: a pipeline of them, a server, a data-parallel wrapper.

```python
from relprop.adapters.module import Explainer

explainer = torch.nn.Sequential(normalise, Explainer(model, gives="heatmap"))
heatmaps = explainer(images)                    # (B, H, W), for the predicted classes
relevance = Explainer(model)(x, target=281)     # like x
```
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from relprop import requests
from relprop.engine import explain
from relprop.errors import RelpropError

__all__ = ["Explainer"]

Gives = Literal["relevance", "heatmap", "quantized"]


class Explainer(nn.Module):
    """A module whose forward pass gives the relevance of another one's.

    The model is a submodule, so that both move together; it stays in evaluation mode whatever mode this one is put in.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        gives: What comes out: ``"relevance"`` like the input, the ``"heatmap"`` with the channels summed, or that one
            ``"quantized"``.
        **options: Passed to :func:`relprop.explain`: ``preset``, ``split``, ``start``, ``overrides`` ...

    Raises:
        RelpropError: If the model cannot be explained, or there is no such thing to give.
    """

    def __init__(self, model: Any, gives: Gives = "relevance", **options: Any) -> None:
        super().__init__()
        if gives not in get_args(Gives):
            raise RelpropError(f"An explainer gives {', '.join(map(repr, get_args(Gives)))}, not {gives!r}.")
        self.model = requests.module(model, halves=True)
        self.gives = gives
        self.options = options
        # What relprop.load returns knows the range of pixels; as the module does not, it is kept beside it.
        self._loaded = None if isinstance(model, nn.Module) else model
        self.training = False
        # A graph of its own is made of the model; there is nothing to be compiled around it.
        self._explain = torch.compiler.disable(explain)

    def train(self, mode: bool = True) -> Explainer:
        """Sets this module's own flag; the model is left in evaluation mode."""
        self.training = mode
        return self

    def forward(self, x: Any, target: Any = None) -> Any:
        """Explains a batch.

        Args:
            x: As in :func:`relprop.explain`, as is ``target``.
            target: As there.

        Returns:
            A tensor; for several inputs as many, in the form in which they were given.

        Raises:
            RelpropError: If the request cannot be met.
        """
        result = self._explain(self._loaded or self.model, x, target, **self.options)
        kinds = {"relevance": lambda: result.relevance, "heatmap": lambda: result.heatmap}
        given: Tensor | Any = kinds.get(self.gives, result.quantized)()
        return given
