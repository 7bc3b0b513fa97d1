"""A method: any way to attribute a model's output to an image, behind one call."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from relprop import requests
from relprop.compat import import_torchvision
from relprop.errors import RelpropError
from relprop.heatmap import Edges, heat_quantization
from relprop.state import undisturbed

__all__ = ["Method", "Progress", "content_seeds", "extra", "quiet"]

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many forward passes of a sample's are done, and of how many: ``progress(done, total)``."""


def quiet(done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Method:
    """Attributes a model's output for one class to the pixels of each image of a batch.

    Calling it leaves the model, the input and torch's and numpy's random generators as they were. What comes out for
    an image does not depend on the other images of the batch, beyond rounding.

    Attributes:
        name: What it is called in tables and on the command line.
        family: Whose code computes it: ``lrp``, ``captum``, ``cam``, ``perturbation``, ``zennit`` or ``control``.
        law: What its attributions sum to, or that they have no law.
        cost: Forward passes that one image of a ResNet-50 costs, by arithmetic: a pass back to the input counts as one.
        citation: Where it was published.
        run: What computes it: ``(module, x, target, **options) -> attributions``.
        spatial: Whether it knows places only, ``(B, 1, H, W)``, or each channel of them, like the input.
        summed: Whether the channels are summed.
        edges: The edges of Heat Quantization, where the maps, summed, go through it.
        levels: Its number of levels.
    """

    name: str
    family: str
    law: str
    cost: float
    citation: str
    run: Callable[..., Tensor] = field(repr=False)
    spatial: bool = False
    summed: bool = False
    edges: Edges | None = None
    levels: int = 8

    @property
    def options(self) -> Mapping[str, Any]:
        """The keywords that a call may add, with their defaults."""
        settled = {"progress", *getattr(self.run, "keywords", ())}  # what a partial has set makes the method what it is
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in settled}

    def __call__(
        self,
        model: Any,
        x: Tensor,
        target: int | Sequence[int] | Tensor | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Tensor:
        """Attributes the target's output to each image.

        Args:
            model: A module in evaluation mode, or what ``relprop.load`` returns.
            x: A batch of images, ``(B, C, H, W)``.
            target: The class: None for the predicted one, a number for all images, or one an image.
            progress: Told of the forward passes of a method that takes many of them.
            **options: What else the method takes; see :attr:`options`.

        Returns:
            The attributions, ``(B, C, H, W)`` like the input, or ``(B, 1, H, W)`` from a method that is ``spatial`` or
            ``summed``. To rank pixels, sum the channels.

        Raises:
            RelpropError: If the request cannot be met, the method does not fit the model or its package is missing.
        """
        module = requests.module(model)
        requests.check_input(x, module)
        if x.ndim != 4:
            raise RelpropError(f"{self.name} explains images (B, C, H, W), not an input of shape {tuple(x.shape)}.")
        if unknown := sorted(options.keys() - self.options.keys()):
            there = ", ".join(self.options) or "none"
            raise RelpropError(f"{self.name} has no option {unknown[0]!r}; its options are: {there}.")
        if "progress" in inspect.signature(self.run).parameters:
            options["progress"] = progress or quiet
        # A caller may have gradients switched off, or an autocast on: neither is to reach inside.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            given, mine = self._targets(module, x, target), x.detach().clone()
            try:
                maps = self.run(module, mine, given, **options).detach()
            except RelpropError:
                raise
            except Exception as error:  # libraries stumble in ways of their own
                self._targets_exist(module, x, given)
                reason = (str(error).strip() or repr(error)).split("\n")[0].rstrip(".")
                raise RelpropError(f"{self.name} cannot explain {type(module).__name__}: {reason}.") from error
        return self._checked(maps, x)

    def _targets(self, module: nn.Module, x: Tensor, target: Any) -> Tensor:
        if target is None:
            with torch.no_grad(), undisturbed(module):
                predicted: Tensor = module(x.detach().clone()).argmax(1)
            return predicted
        given = requests.targets(target, (x.shape[0], sys.maxsize))
        assert given is not None
        if given.ndim != 1:
            raise RelpropError(f"{self.name} explains one class of each image, not {given.shape[1]}; call it for each.")
        return given.to(x.device)

    @staticmethod
    def _targets_exist(module: nn.Module, x: Tensor, target: Tensor) -> None:
        """Refuses a class that is not there; asked only when something went wrong, for it costs a forward pass."""
        with torch.no_grad(), undisturbed(module):
            requests.targets(target, (x.shape[0], module(x[:1].detach().clone()).shape[1]))

    def _checked(self, maps: Tensor, x: Tensor) -> Tensor:
        channels = 1 if self.spatial else x.shape[1]
        assert maps.shape == (x.shape[0], channels, *x.shape[2:]), (self.name, maps.shape)
        finite = maps.isfinite().flatten(1).all(1)
        if not finite.all():
            bad = int((~finite).nonzero()[0])
            raise RelpropError(f"{self.name} gave NaN or infinite attributions for image {bad} of the batch.")
        if self.summed:
            maps = maps.sum(1, keepdim=True)
        return maps if self.edges is None else heat_quantization(maps, self.levels, edges=self.edges)


def content_seeds(x: Tensor, salt: str) -> list[int]:
    """A seed for each sample, from what it holds: the same alone, in any batch and in any run."""
    samples = x.detach().cpu().contiguous().numpy()
    digests = (hashlib.sha256(salt.encode() + sample.tobytes()).digest() for sample in samples)
    return [int.from_bytes(digest[:4], "little") for digest in digests]


def extra(name: str, source: str = "relprop[methods]") -> Any:
    """Imports a module of a package that not everybody has.

    Args:
        name: The module.
        source: What pip gets it with.

    Raises:
        RelpropError: If it is not installed.
    """
    with suppress(ImportError):
        import_torchvision()  # first, for some of them import it too
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise RelpropError(f"This needs {package}; install it with pip install '{source}'.") from error
