"""`paper`, `released` and the four ablations on ResNet-18 and -50 against an LRP written by hand for those networks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference as ref
import torch
from torch import Tensor, nn

import relprop

ABLATIONS = {
    "i": ("symmetric", False),
    "ii": ("symmetric", True),
    "iii": ("ratio", False),
    "iv": ("ratio", True),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
MakeModel = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def models(torchvision_model: MakeModel) -> Callable[[str, torch.dtype], nn.Module]:
    made = {
        (name, dtype): torchvision_model(name, seed=1).to(dtype)
        for name in ("resnet18", "resnet50")
        for dtype in TOLERANCE
    }
    return lambda name, dtype: made[name, dtype]


def images(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Two images of noise, the second with a black half, so that there are dead units."""
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[1, :, : size // 2] = 0
    return x.to(dtype)


def check(model: nn.Module, x: Tensor, preset: str, ablation: str, target: Tensor | None = None) -> None:
    """The map, and the relevance arriving at every layer and block above it."""
    split, identity_skips = ABLATIONS[ablation]
    rules = ref.ResNetRules(released=preset == "released", split=split, identity_skips=identity_skips)
    want = ref.resnet_relevance(model, x, rules, target)
    e = relprop.explain(
        model, x, target, preset=preset, split=split, identity_skips=identity_skips, layers=list(want.at)
    )
    tolerance = TOLERANCE[x.dtype]
    assert torch.equal(e.target, want.target)
    torch.testing.assert_close(e.output, want.output, rtol=tolerance, atol=tolerance * want.output.abs().max().item())
    torch.testing.assert_close(e.start, want.start, rtol=100 * tolerance, atol=0)
    for name, relevance in want.at.items():
        if name == "maxpool" and preset == "released" and x.dtype == torch.float32:
            # A unit that is alone in its 2x2 window, and hardly above the 1e-5 in the denominator, magnifies the
            # rounding of the forward pass: the reference itself is 5e-5 away from its own float64 there.
            continue
        assert_same(e.relevance_at(name), relevance, tolerance, name)
    assert_same(e.relevance, want.input, tolerance, "input")
    assert_same(e.heatmap, want.input.sum(1), tolerance, "heatmap")
    if preset == "paper":
        kept = e.relevance.double().flatten(1).sum(1) / e.start.double() - 1
        assert kept.abs().max() <= tolerance


def assert_same(got: Tensor, want: Tensor, tolerance: float, name: str) -> None:
    """Each sample's largest difference, relative to that sample's largest value."""
    assert got.shape == want.shape, name
    assert got.dtype == want.dtype, name
    scale = want.flatten(1).abs().amax(1)
    worst = ((got - want).flatten(1).abs().amax(1) / scale).max().item()
    assert worst <= tolerance, f"{name}: {worst:.2e} of the map's maximum"


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("preset", ["paper", "released"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_map_equals_the_reference(
    models: Callable[[str, torch.dtype], nn.Module], name: str, dtype: torch.dtype, preset: str, ablation: str
) -> None:
    check(models(name, dtype), images(64, dtype), preset, ablation)


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_map_equals_the_reference_at_full_size(models: Callable[[str, torch.dtype], nn.Module], preset: str) -> None:
    check(models("resnet50", torch.float32), images(224, torch.float32), preset, "iv")


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_any_target_may_be_asked_for(models: Callable[[str, torch.dtype], nn.Module], preset: str) -> None:
    check(models("resnet18", torch.float64), images(64, torch.float64), preset, "iv", torch.tensor([281, 207]))


@pytest.mark.parametrize("rules", [ref.ResNetRules(), ref.ResNetRules(released=True)], ids=["paper", "released"])
def test_the_steps_of_the_reference_agree_with_the_explicit_matrix(rules: ref.ResNetRules) -> None:
    """The reference itself: each of its layers, dead units among them."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64).clamp(min=0)
    x[1, :, :4] = 0
    x[2] = 0
    brute = ref.zplus_stabilised(1e-5, bias=False) if rules.released else ref.zplus
    conv = nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False).double()
    nn.init.constant_(conv.weight[0], -1)
    projection = nn.Conv2d(4, 5, 1, stride=2, bias=False).double()
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    for layer, back, matrix in (
        (conv, rules.conv, conv),
        (projection, rules.conv, projection),
        (pool, rules.max_pool, nn.AvgPool2d(2) if rules.released else pool),
    ):
        r = torch.randn_like(layer(x))
        torch.testing.assert_close(back(layer, x, r), ref.brute_force(brute, matrix, x, r), rtol=0, atol=1e-12)
    r = torch.randn(3, 4, dtype=torch.float64)
    average = rules.global_average(x, r)
    torch.testing.assert_close(average, ref.brute_force(brute, nn.AdaptiveAvgPool2d(1), x, r), rtol=0, atol=1e-12)
    head = nn.Linear(4, 3, bias=False).double()
    features, r = x.mean((2, 3)), torch.randn(3, 3, dtype=torch.float64)
    torch.testing.assert_close(
        rules.linear(head, features, r), ref.brute_force(brute, head, features, r), rtol=0, atol=1e-12
    )
