"""LRP as one of Captum's attributions: it goes wherever those go, such as into ``NoiseTunnel``.

```python
from captum.attr import NoiseTunnel
from relprop.adapters.captum import LRP, LayerLRP

attributions, delta = LRP(model).attribute(x, target=281, return_convergence_delta=True)
several = LRP(model, preset="mixture").attribute(x, target=torch.tensor([[281, 207]]))   # (1, 2, 3, 224, 224)
smooth = NoiseTunnel(LRP(model)).attribute(x, nt_samples=8, stdevs=0.1, target=281)
hidden = LayerLRP(model, model.layer4).attribute(x, target=281)                           # like layer4's output
```

:class:`relprop.LRP` is the same for who has no Captum installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from relprop import lrp, requests
from relprop.errors import RelpropError
from relprop.methods.method import extra

__all__ = ["LRP", "LayerLRP"]

if TYPE_CHECKING:  # Captum has no types; these are as much of it as is used

    class Attribution:
        def __init__(self, forward_func: Any) -> None: ...

    class LayerAttribution(Attribution):
        def __init__(self, forward_func: Any, layer: Any) -> None: ...

    def log_usage(function: Any) -> Any: ...

else:
    Attribution = extra("captum.attr").Attribution
    LayerAttribution = extra("captum.attr").LayerAttribution
    log_usage = extra("captum.log").log_usage()  # NoiseTunnel calls what it wraps


def _module(model: Any) -> Any:
    """What Captum calls: it may be put into evaluation mode later."""
    return model if isinstance(model, nn.Module) else getattr(model, "module", model)


class LRP(lrp.LRP, Attribution):
    """Layer-wise relevance propagation that loses nothing at skip connections, as one of Captum's attributions.

    Args:
        model: A module in evaluation mode, or what ``relprop.load`` returns; nothing is changed on it.
        **options: Passed to :func:`relprop.explain`: ``preset``, ``split``, ``identity_skips``, ``overrides``, and
            ``start``, which is the logit here as in Captum.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        lrp.LRP.__init__(self, model, **options)
        Attribution.__init__(self, _module(model))

    attribute = log_usage(lrp.LRP.attribute)

    @property
    def multiplies_by_inputs(self) -> bool:
        """True: attributions are shares of the output, not sensitivities."""
        return True

    def has_convergence_delta(self) -> bool:
        """True: relevance that is missing in the end can be told."""
        return True

    def compute_convergence_delta(self, attributions: Tensor | tuple[Tensor, ...], output: Tensor) -> Tensor:
        """What attributions lack of the output that they were computed for.

        Args:
            attributions: As :meth:`attribute` gave them, for all inputs.
            output: The logit of each target, ``(B,)`` or ``(B, T)``.
        """
        return lrp.lacking(output, attributions if isinstance(attributions, tuple) else (attributions,))


class LayerLRP(LRP, LayerAttribution):
    """Relevance of hidden layers, as one of Captum's layer attributions.

    Args:
        model: As for :class:`LRP`.
        layer: A module of the model or its name, or a list of them. A module that is called more than once is asked
            for by name and call, such as ``"layer1.0.relu#1"`` for the second.
        **options: As for :class:`LRP`.
    """

    def __init__(self, model: Any, layer: nn.Module | str | list[nn.Module | str], **options: Any) -> None:
        LayerAttribution.__init__(self, _module(model), layer)
        LRP.__init__(self, model, **options)
        self.layer = layer

    @log_usage
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        return_convergence_delta: bool = False,
        attribute_to_layer_input: bool = False,
        verbose: bool = False,
    ) -> Any:
        """Attributes the target's logit to a layer's output or input.

        Args:
            inputs: As for :meth:`LRP.attribute`, as are ``target``, ``additional_forward_args`` and ``verbose``.
            target: As there.
            additional_forward_args: As there.
            return_convergence_delta: Whether to return what the layer's relevance lacks of the logit, too; a layer that
                a skip leads around has a part of it only.
            attribute_to_layer_input: Whether the layer's input is meant instead of its output.
            verbose: As there.

        Returns:
            Attributions like the layer's output or input, a list of them for a list of layers; with the delta, a pair.

        Raises:
            RelpropError: If there is no such layer, it is called more than once, or the request cannot be met.
        """
        wanted = self.layer if isinstance(self.layer, list) else [self.layer]
        names = [requests.name_of(layer, requests.module(self.model, halves=True)).partition("#") for layer in wanted]
        suffix = "" if attribute_to_layer_input else requests.OUTPUT
        first = inputs if isinstance(inputs, tuple) else (inputs,)
        layers = [name + suffix for name, _, _ in names]
        result = self._explained(first, target, additional_forward_args, verbose, layers)
        found = []
        for (name, _, call), layer in zip(names, layers, strict=True):
            calls = sum(there == layer for there, _ in result.layers)
            if calls > 1 and not call:
                raise RelpropError(f"The layer {name!r} is called {calls} times; pass its name as '{name}#0' or so.")
            found.append(result.relevance_at(layer, int(call or 0)))
        deltas = [lrp.lacking(result.start, [r]) for r in found]
        single = not isinstance(self.layer, list)
        attributions, delta = (found[0], deltas[0]) if single else (found, deltas)
        return (attributions, delta) if return_convergence_delta else attributions
