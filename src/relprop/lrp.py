"""LRP behind the interface that Captum's users know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relprop.engine import explain


class LRP:
    """Layer-wise relevance propagation with Captum's signature.

    It starts from the logit, as Captum does, and loses nothing at skip connections.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns.
        **options: Passed to :func:`relprop.explain`: ``preset``, ``split``, ``identity_skips``, ``overrides``.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.options = {"start": "logit", **options}

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        return_convergence_delta: bool = False,
        verbose: bool = False,
    ) -> Any:
        """Attributes the target's logit to the inputs.

        Args:
            inputs: A batch, or a tuple of them, one for each of the model's first arguments.
            target: As in :func:`relprop.explain`; None for the predicted class.
            additional_forward_args: The model's other arguments: one, or a tuple.
            return_convergence_delta: Whether to return what the attributions' sum lacks of the logit, too.
            verbose: Whether to print the ledger.

        Returns:
            Attributions like the inputs; with the delta, a pair.

        Raises:
            RelpropError: If the request cannot be met.
        """
        first = inputs if isinstance(inputs, tuple) else (inputs,)
        more = additional_forward_args
        more = () if more is None else more if isinstance(more, tuple) else (more,)
        result = explain(
            self.model, (*first, *more) if len(first) + len(more) > 1 else first[0], target, **self.options
        )
        if verbose:
            print(result.ledger)
        relevance = result.relevance if isinstance(result.relevance, tuple) else (result.relevance,)
        attributions = relevance[: len(first)] if isinstance(inputs, tuple) else relevance[0]
        if not return_convergence_delta:
            return attributions
        delta = result.start.double()
        for r in relevance:
            delta = delta if r is None else delta - r.sum(tuple(range(delta.ndim, r.ndim)), dtype=torch.float64)
        return attributions, delta.to(result.start.dtype)
