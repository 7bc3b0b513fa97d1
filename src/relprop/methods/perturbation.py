"""Perturbation: what the score does when parts of the image are hidden. RISE, LIME and Kernel SHAP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relprop.methods.captum_methods import seeded
from relprop.methods.method import Method, Progress, content_seeds, extra, quiet
from relprop.methods.unshared import shadow


def _rise(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    masks: int = 8000,
    cells: int = 7,
    visible: float = 0.5,
    seed: int = 0,
    together: int = 32,
    scorer: Callable[[Tensor], Tensor] | None = None,
    progress: Progress = quiet,
) -> Tensor:
    """The mean of random masks, each weighed by the probability of what it shows (Petsiuk et al., 2018).

    The masks are the same for every image. Each is a coarse random grid, enlarged to one cell more than the image and
    cut out at a random offset. A ``scorer`` is a faster way from images to the model's probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    grids = (torch.rand(masks, 1, cells, cells, generator=generator) < visible).to(x)
    # A cell's size, rounded up, so that the enlarged grid covers the image at every offset.
    cell = [-(-side // cells) for side in x.shape[2:]]
    large = [(cells + 1) * side for side in cell]
    offsets = torch.stack([torch.randint(side, (masks,), generator=generator) for side in cell], 1).tolist()
    twin, (height, width) = shadow(model), x.shape[2:]
    maps = torch.zeros(x.shape[0], 1, height, width, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        for first in range(0, masks, together):
            chosen = offsets[first : first + together]
            enlarged = F.interpolate(grids[first : first + together], large, mode="bilinear", align_corners=False)
            cut = torch.stack([m[:, i : i + height, j : j + width] for m, (i, j) in zip(enlarged, chosen, strict=True)])
            for i in range(x.shape[0]):
                seen = x[i] * cut
                scores = (scorer(seen) if scorer else twin(seen).softmax(1))[:, target[i]]
                maps[i] += (scores[:, None, None, None] * cut).sum(0)
            progress(min(first + together, masks), masks)
    return maps / (masks * visible)


def superpixels(x: Tensor, count: int = 64, steps: int = 10, compactness: float = 0.5) -> Tensor:
    """Pixels grouped by colour and place: k-means from a regular grid, as in SLIC (Achanta et al., 2012).

    Args:
        x: Images ``(B, C, H, W)``.
        count: About how many groups.
        steps: How often the centres move.
        compactness: How much a cell's width of distance counts, in standard deviations of the colours.

    Returns:
        The group of every pixel, ``(B, H, W)``, numbered from 0 in each image without gaps.
    """
    height, width = x.shape[2:]
    rows = max(1, round((count * height / width) ** 0.5))
    columns = max(1, round(count / rows))
    cell = (height * width / (rows * columns)) ** 0.5
    grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack(grid).to(x).flatten(1).T / cell * compactness
    start = (grid[0] * rows // height * columns + grid[1] * columns // width).flatten().to(x.device)
    groups = []
    for image in x:
        colours = image.flatten(1).T
        points = torch.cat([(colours - colours.mean(0)) / colours.std().clamp_min(1e-6), places], 1)
        group = start
        for _ in range(steps):
            size = torch.bincount(group, minlength=rows * columns)
            sums = torch.zeros(rows * columns, points.shape[1]).to(points).index_add_(0, group, points)
            centres = sums / size.clamp_min(1)[:, None]
            # An empty group is out of everybody's reach.
            distances = torch.cdist(points, centres).masked_fill(size == 0, torch.inf)
            group = distances.argmin(1)
        groups.append(group.unique(return_inverse=True)[1].reshape(height, width))
    return torch.stack(groups)


def _fitted(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    kernel_shap: bool,
    samples: int = 1000,
    segments: int = 64,
    baseline: float = 0.0,
    together: int = 32,
) -> Tensor:
    """The weights of a linear model of the score over which superpixels are shown."""
    attr, twin = extra("captum.attr"), shadow(model)
    extra("sklearn")  # what captum fits the linear model with
    if kernel_shap:
        fit = attr.KernelShap(twin)
    else:
        # As the authors' package has it for images: ridge regression of the probability, cosine distance, width 0.25.
        near = extra("captum.attr._core.lime").get_exp_kernel_similarity_function("cosine", kernel_width=0.25)
        ridge = extra("captum._utils.models.linear_model").SkLearnRidge(alpha=1.0)
        fit = attr.Lime(lambda batch: twin(batch).softmax(1), interpretable_model=ridge, similarity_func=near)
    maps = []
    for i, (group, seed) in enumerate(zip(superpixels(x, segments), content_seeds(x, "superpixels"), strict=True)):
        with seeded(seed), torch.no_grad():
            weights = fit.attribute(
                x[i : i + 1],
                baseline,
                target=target[i : i + 1],
                feature_mask=group[None, None].expand(1, x.shape[1], -1, -1),
                n_samples=samples,
                perturbations_per_eval=together,
            )
        # A superpixel's weight is the superpixel's, so its pixels share it: a map then sums to what it explains.
        size = torch.bincount(group.flatten())[group]
        maps.append(weights[:, :1].to(x) / size.to(x))
    return torch.cat(maps)


METHODS = (
    Method(
        "rise",
        "perturbation",
        "none: the expected probability where a pixel is shown",
        8000,
        "Petsiuk et al., 2018, RISE: Randomized Input Sampling for Explanation of Black-box Models, BMVC",
        _rise,
        spatial=True,
    ),
    Method(
        "lime",
        "perturbation",
        "none: weights of a linear model of the probability",
        1000,
        "Ribeiro et al., 2016, Why Should I Trust You?: Explaining the Predictions of Any Classifier, KDD",
        partial(_fitted, kernel_shap=False),
        spatial=True,
    ),
    Method(
        "kernel-shap",
        "perturbation",
        "sums to f(x) - f(baseline), the logits",
        1000,
        "Lundberg and Lee, 2017, A Unified Approach to Interpreting Model Predictions, NeurIPS",
        partial(_fitted, kernel_shap=True),
        spatial=True,
    ),
)
