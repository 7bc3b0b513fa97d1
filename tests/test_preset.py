"""Our own preset: the contrast it starts with, the head's rule, and strides evened out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import relprop
from relprop import rules, tents


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """A small residual net with a strided 1x1 convolution on its skip, as ResNets have."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.skip = nn.Conv2d(6, 8, 1, stride=2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.fc((self.conv(x) + self.skip(x)).relu().mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net().double().eval()


# -- tents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "sizes"),
    [((2,), (7,)), ((2, 2), (6, 9)), ((3, 1), (7, 5)), ((4, 4), (3, 3)), ((2, 2, 2), (5, 4, 6))],
    ids=["one axis", "two", "one of two", "wider than the map", "three"],
)
def test_a_tent_loses_nothing_and_keeps_signs(stride: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    r = noise(2, 3, 4, *sizes)
    smooth = tents.evened(r, stride)
    assert smooth.shape == r.shape
    torch.testing.assert_close(smooth.flatten(3).sum(3), r.flatten(3).sum(3))
    assert tents.evened(r.abs(), stride).min() >= 0
    assert not torch.equal(smooth, r)


def test_a_tent_by_hand() -> None:
    r = torch.tensor([8.0, 0, 0, 0, 12.0]).reshape(1, 1, 1, 5)
    expected = torch.tensor([8 * 2 / 3, 8 / 3, 0, 4, 8])  # at a rim, over the two places that are there
    torch.testing.assert_close(tents.evened(r, (2,))[0, 0, 0], expected)


def test_without_strides_nothing_is_evened() -> None:
    r = noise(1, 1, 2, 4, 4)
    assert tents.evened(r, (1, 1)) is r


def test_a_strided_1x1_convolution_reaches_every_place_of_a_step() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).double().eval()
    model[0].weight.data.abs_()  # so that every output is alive
    model[0].bias.data.zero_()
    x = noise(1, 2, 6, 6).abs()
    dots = relprop.explain(model, x, start="one", overrides={"0": "z+"}).heatmap[0]
    even = relprop.explain(model, x, start="one", overrides={"0": rules.evened(rules.zplus())}).heatmap[0]
    assert (dots != 0).sum() == 9
    assert (even != 0).all()
    torch.testing.assert_close(even.sum(), dots.sum())


# -- the start --------------------------------------------------------------------------------------------------------


def test_contrast_is_the_probability_and_its_log_gradient(net: nn.Module) -> None:
    x = noise(2, 3, 8, 8)
    p = net(x).softmax(1).detach()
    target = torch.tensor([1, 4])
    own = torch.zeros_like(p).scatter_(1, target[:, None], 1.0)
    by_hand = p.gather(1, target[:, None]) * (own + 4 * (own - p))
    e = relprop.explain(net, x, target, start="contrast", strict=True)
    torch.testing.assert_close(e.start, p.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(e.relevance, relprop.explain(net, x, start=by_hand).relevance)


def test_several_targets_are_contrasted_each_by_itself(net: nn.Module) -> None:
    x = noise(2, 3, 8, 8)
    both = relprop.explain(net, x, torch.tensor([[0, 3], [2, 1]]))
    for k, target in enumerate(([0, 2], [3, 1])):
        torch.testing.assert_close(both.relevance[:, k], relprop.explain(net, x, target).relevance)


def test_it_is_the_default_and_says_so(net: nn.Module) -> None:
    x = noise(1, 3, 8, 8)
    e = relprop.explain(net, x)
    assert dict(e.settings) == {
        "preset": "relprop",
        "split": None,  # the preset's own, for there are two
        "identity_skips": True,
        "start": "contrast",
    }
    assert torch.equal(e.relevance, relprop.explain(net, x, preset="relprop", start="contrast").relevance)
    assert relprop.explain(net, x, preset="paper").settings["start"] == "probability"
    assert relprop.explain(net, x, layer="conv").settings["start"] == "value"


def test_a_map_of_classes_has_no_contrast() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).double().eval()
    x = noise(1, 3, 5, 5)
    assert relprop.explain(model, x, 1).settings["start"] == "probability"
    with pytest.raises(relprop.RelpropError, match="'contrast' is unknown; pass 'probability'"):
        relprop.explain(model, x, 1, start="contrast")


# -- together ---------------------------------------------------------------------------------------------------------


def test_it_adds_up_to_the_probability_and_tells_classes_apart(net: nn.Module) -> None:
    x = noise(4, 3, 8, 8)
    everyone = torch.arange(5).expand(4, 5)
    e = relprop.explain(net, x, everyone, strict=True)
    torch.testing.assert_close(e.relevance.flatten(2).sum(2), net(x).softmax(1).detach())
    assert not e.ledger.absorbed_by_cause
    assert e.ledger.error.max() < 1e-12
    plain = relprop.explain(net, x, everyone, preset="paper")
    assert alike(e.heatmap) < alike(plain.heatmap) - 0.2


def alike(maps: Tensor) -> float:
    """Mean correlation of the maps of different classes."""
    found = [torch.corrcoef(of.flatten(1)) for of in maps]
    return float(torch.stack([(c.sum() - len(c)) / (c.numel() - len(c)) for c in found]).mean())
