"""Claims: the figures that the paper has, and the method of ours that stands for each of its rows.

Otsuki et al., 2024, *Layer-Wise Relevance Propagation with Conservation Property for ResNet*, ECCV. Percentages of the
paper are fractions here.
"""

from __future__ import annotations

from dataclasses import dataclass

from relprop import methods
from relprop.methods import Method

COSTLY = 500
"""Forward passes an image from which a method is measured on fewer of them."""

FAILED, EXAMINED = 0.311, 100
"""The share of explanations that failed in the paper, and how many of those it looked at."""
CATEGORIES = {"Insufficiently Attended": 40, "Over-Attended": 25, "Wrongly Attended": 35}
"""What it found in them."""
FORWARD_MS, EXPLAINED_MS = 4.66, 40.7
"""Its time for a forward pass, and for one with the explanation, on a GPU."""


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        label: What it is called there.
        method: Our method.
        paper: Insertion, deletion and ID as printed; None for what the paper does not have.
    """

    label: str
    method: str
    paper: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Claim:
    """A table of the paper, or one that answers a question about it.

    Attributes:
        title: What it shows.
        lines: Its rows.
        reference: The method that the others are compared with, image by image; None for no comparison.
    """

    title: str
    lines: tuple[Line, ...]
    reference: str | None = None

    @property
    def methods(self) -> list[Method]:
        """The methods to be measured, controls included."""
        return [methods.get(name) for name in dict.fromkeys(line.method for line in (*self.lines, *CONTROLS))]


CONTROLS = (
    Line("random map", "random"),
    Line("random map, quantised", "random+hq-released"),
    Line("centred Gaussian", "centre"),
)

_OURS = Line("the paper's (iv), quantised", "released+hq-released", (0.563, 0.018, 0.545))
_RAW = Line("the paper's (iv), raw", "released")
_EXACT = Line("the paper's (iv), raw, exact conservation", "paper")
_GRAD_CAM = Line("Grad-CAM", "grad-cam", (0.497, 0.126, 0.371))
_INTEGRATED = Line("Integrated Gradients", "integrated-gradients", (0.052, 0.062, -0.011))
_GUIDED = Line("Guided BackPropagation", "guided-backprop", (0.115, 0.057, 0.057))
_DEEPLIFT = Line("DeepLIFT", "deeplift", (0.056, 0.063, -0.007))
_EPSILON = Line("LRP, epsilon", "captum-lrp", (0.095, 0.083, 0.011))

CLAIMS: dict[str, Claim] = {
    "table1": Claim(
        "Explanation methods (the paper's table 1, and the full table of its appendix)",
        (
            _EPSILON,
            _INTEGRATED,
            _GUIDED,
            _DEEPLIFT,
            _GRAD_CAM,
            Line("Score-CAM", "score-cam", (0.488, 0.133, 0.355)),
            _OURS,
            _RAW,
            _EXACT,
        ),
        reference="grad-cam",
    ),
    "table2": Claim(
        "The four ablations, quantised as in the paper, and raw (table 2)",
        (
            Line("(i) symmetric, identity skips out", "i+hq-released", (0.543, 0.033, 0.510)),
            Line("(ii) symmetric, identity skips in", "ii+hq-released", (0.553, 0.036, 0.517)),
            Line("(iii) ratio, identity skips out", "iii+hq-released", (0.543, 0.033, 0.510)),
            Line("(iv) ratio, identity skips in", "released+hq-released", (0.563, 0.018, 0.545)),
            Line("(i), raw", "i"),
            Line("(ii), raw", "ii"),
            Line("(iii), raw", "iii"),
            Line("(iv), raw", "released"),
        ),
        reference="released",
    ),
    "table3": Claim(
        "With and without Heat Quantization (table 3), and with other numbers of levels Q",
        (
            Line("(i), raw", "i", (0.442, 0.066, 0.376)),
            Line("(i), quantised", "i+hq-released", (0.543, 0.033, 0.510)),
            Line("(iv), raw", "released"),
            *(
                Line(f"(iv), Q = {levels}", f"released+hq{levels if levels != 8 else ''}-released")
                for levels in (2, 4, 8, 16, 32, 64)
            ),
        ),
        reference="released",
    ),
    "rules": Claim(
        "Propagation rules (the appendix's table)",
        (
            _EPSILON,
            Line("LRP, mixture", "captum-lrp-mixture", (0.086, 0.075, 0.011)),
            Line("the paper's, mixture as released, quantised", "released-mixture+hq-released", (0.646, 0.002, 0.644)),
            Line("the paper's, stabilised mixture, quantised", "mixture+hq-released"),
            Line("the paper's, stabilised mixture, raw", "mixture"),
            Line("the paper's, z+, quantised", "released+hq-released", (0.563, 0.018, 0.545)),
            Line("the paper's, z+, raw", "released"),
        ),
        reference="released",
    ),
    "channels": Claim(
        "Gradient baselines ranked by their first channel, as published, and by the sum of all",
        tuple(
            line
            for first in (_INTEGRATED, _GUIDED, _DEEPLIFT)
            for line in (first, Line(f"{first.label}, all channels", f"{first.method}+sum"))
        ),
    ),
    "pools": Claim(
        "What stands in for the max pool",
        (
            Line("winner takes all", "paper-winner"),
            Line("average over the real window", "paper"),
            Line("2x2 average", "paper-2x2"),
            _GRAD_CAM,
        ),
        reference="paper",
    ),
    "norms": Claim(
        "Batch norms passed through or folded into their convolutions",
        (Line("passed through", "paper"), Line("folded", "paper-folded")),
        reference="paper",
    ),
}
