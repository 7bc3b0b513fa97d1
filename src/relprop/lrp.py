"""LRP behind the interface that Captum's users know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relprop.engine import explain
from relprop.errors import RelpropError


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
            inputs: A batch, or a tuple with one.
            target: As in :func:`relprop.explain`; None for the predicted class.
            additional_forward_args: Not supported: the model has to take one tensor.
            return_convergence_delta: Whether to return what the attributions' sum lacks of the logit, too.
            verbose: Whether to print the ledger.

        Returns:
            Attributions like the inputs; with the delta, a pair.

        Raises:
            RelpropError: If the request cannot be met.
        """
        if additional_forward_args is not None:
            msg = (
                "additional_forward_args cannot be passed on: relprop explains models of one tensor; wrap the "
                "model to fix the others."
            )
            raise RelpropError(msg)
        several = isinstance(inputs, tuple)
        if several and len(inputs) != 1:
            msg = f"There are {len(inputs)} inputs; relprop explains models of one tensor."
            raise RelpropError(msg)
        x = inputs[0] if isinstance(inputs, tuple) else inputs
        result = explain(self.model, x, target, **self.options)
        if verbose:
            print(result.ledger)
        attributions = (result.relevance,) if several else result.relevance
        if not return_convergence_delta:
            return attributions
        axes = tuple(range(result.target.ndim, result.relevance.ndim))
        delta = result.start - result.relevance.sum(axes, dtype=torch.float64).to(result.start.dtype)
        return attributions, delta
