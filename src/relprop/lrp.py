"""LRP behind the interface that Captum's users know; :mod:`relprop.adapters.captum` has it as one of Captum's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relprop.engine import explain
from relprop.errors import RelpropError
from relprop.result import Explanation


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
            target: As in :func:`relprop.explain`: None for the predicted class, one for all samples or one a sample, or
                a ``(B, T)`` tensor for several of each, which attributions and delta then have a second axis for. A
                tuple, or a list with one a sample, is a place in an output of more axes, such as (class, row, column).
            additional_forward_args: The model's other arguments: one, or a tuple.
            return_convergence_delta: Whether to return what the attributions' sum lacks of the logit, too.
            verbose: Whether to print the ledger.

        Returns:
            Attributions like the inputs; with the delta, a pair.

        Raises:
            RelpropError: If the request cannot be met.
        """
        first = inputs if isinstance(inputs, tuple) else (inputs,)
        if not first:
            raise RelpropError("There are no inputs to attribute to; pass a batch, or a tuple of them.")
        result = self._explained(first, target, additional_forward_args, verbose)
        relevance = result.relevance if isinstance(result.relevance, tuple) else (result.relevance,)
        attributions = relevance[: len(first)] if isinstance(inputs, tuple) else relevance[0]
        return (attributions, lacking(result.start, relevance)) if return_convergence_delta else attributions

    def _explained(
        self, first: tuple[Tensor, ...], target: Any, more: Any, verbose: bool, layers: Sequence[str] = ()
    ) -> Explanation:
        more = () if more is None else more if isinstance(more, tuple) else (more,)
        options = {**self.options, "layers": layers}
        if isinstance(target, Tensor) and target.numel() == 1 and target.ndim < 2:
            target = target.reshape(())  # for all samples, Captum says
        if isinstance(target, tuple) or (isinstance(target, list) and any(isinstance(t, tuple) for t in target)):
            options["start"], target = _at(target, one=options["start"] == "one"), None
        result = explain(self.model, (*first, *more) if len(first) + len(more) > 1 else first[0], target, **options)
        if verbose:
            print(result.ledger)
        return result


def lacking(start: Tensor, relevance: Sequence[Tensor | None]) -> Tensor:
    """What the sum of relevance lacks of its start, for each sample and target."""
    delta = start.double()
    for r in relevance:
        delta = delta if r is None else delta - r.sum(tuple(range(delta.ndim, r.ndim)), dtype=torch.float64)
    return delta.to(start.dtype)


def _at(target: tuple[int, ...] | list[tuple[int, ...]], *, one: bool) -> Callable[[Tensor], Tensor]:
    """A start at one place of each sample's output, with its value there."""

    def start(output: Tensor) -> Tensor:
        places = target if isinstance(target, list) else [target] * len(output)
        value = torch.zeros_like(output)
        try:
            at = (torch.arange(len(output)), *torch.tensor(places).T)
            if len(at) != output.ndim or len(places) != len(output):
                raise IndexError
            value[at] = 1.0 if one else output[at]
        except (IndexError, TypeError, ValueError, RuntimeError):
            msg = (
                f"The target {target} is no place in an output of shape {tuple(output.shape)}; pass a tuple of "
                f"{output.ndim - 1}, or a list with one a sample. Several classes of each sample are a (B, T) tensor."
            )
            raise RelpropError(msg) from None
        return value

    return start
