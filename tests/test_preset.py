"""Our own preset: the contrast it starts with, the head's rule, and strides evened out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import relprop
from relprop import rules, starts, tents
from relprop.convolution import Convolution
from relprop.presets import PRESETS
from relprop.transforms import same


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
    ("kernel", "stride", "padding", "size"),
    [(1, 2, 0, 8), (3, 2, 1, 16), (7, 2, 3, 32), (5, 3, 2, 30)],
    ids=["1 by 2", "3 by 2", "7 by 2", "5 by 3"],
)
def test_what_is_even_stays_more_even_behind_a_tent_at_rims_too(
    kernel: int, stride: int, padding: int, size: int
) -> None:
    weight, around = torch.ones(1, 1, kernel, 1).double(), [(padding, padding), (0, 0)]
    linear = Convolution(weight, None, (stride, 1), around, (1, 1), 1)
    a = torch.ones(1, 1, size, 1).double()
    r = torch.ones(1, *linear(a).shape).double()

    def handed(z: Tensor) -> Tensor:
        """What places get of ones, by contributions ``(outputs, inputs)``."""
        return (1 / z.sum(1)) @ z

    window = linear.windows()[0]
    seen = window.apply(torch.eye(size).double()[:, None], window.weight)[:, 0].T
    tent, once, twice = (handed(tents.Axis(window, stride, size, k).matrix(summed=True)) for k in range(3))
    (found,), *_ = rules.evened(rules.zplus())(linear, a, r)
    torch.testing.assert_close(found.flatten(), twice)
    uneven = [float(of.max() / of.min().clamp(min=1e-9)) for of in (tent, once, twice)]
    assert uneven[0] > uneven[1] > uneven[2] >= 1
    assert float(handed(seen).max() / handed(seen).min().clamp(min=1e-9)) > uneven[2]


def test_a_tent_by_hand() -> None:
    """Five places, seen at the first, third and fifth. Of ones, the first gets 2/3 of one output, the second 1/3 and
    1/4, the third 1/2; all of it is 3, the mean 3/5."""
    window = Convolution(torch.ones(1, 1, 1).double(), None, [2], [(0, 0)], [1], 1)
    tent = torch.tensor([[0.5, 0.25, 0, 0, 0], [0, 0.25, 0.5, 0.25, 0], [0, 0, 0, 0.25, 0.5]]).double()
    torch.testing.assert_close(tents.Axis(window, 2, 5, rounds=0).matrix(summed=True), tent)
    weights = 3 / 5 / torch.tensor([2 / 3, 7 / 12, 1 / 2, 7 / 12, 2 / 3]).double()
    torch.testing.assert_close(tents.Axis(window, 2, 5, rounds=1).matrix(summed=True), tent * weights)


def test_a_map_and_its_transpose_agree_behind_a_tent() -> None:
    for kernel, groups in (((1, 1), 1), ((3, 1), 2), ((3, 3), 1)):
        linear = Convolution(
            noise(4, 4 // groups, *kernel), None, (2, 3), [(kernel[0] // 2,) * 2, (0, 0)], (1, 1), groups
        )
        through = tents.tented(linear, (4, 9, 8))
        a, s = noise(2, 4, 9, 8), noise(2, *linear(noise(1, 4, 9, 8)).shape[1:])
        ahead, back = through.apply(a, linear.weight), through.transpose(s, linear.weight, (4, 9, 8))
        torch.testing.assert_close((ahead * s).sum(), (a * back).sum())
        torch.testing.assert_close(through.shares(s[None], same, (4, 9, 8))[0], back)
        ones = through.spread(s / through.fan((4, 9, 8)), (4, 9, 8))
        torch.testing.assert_close(ones.sum(), s.sum())


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        (nn.Conv2d(2, 3, 3, 1), ()),
        (nn.Conv2d(2, 3, 1, 2), (2, 2)),
        (nn.Conv2d(2, 3, (3, 2), (2, 2)), (2, 1)),  # two taps, two apart: every column once
        (nn.Conv2d(2, 3, 4, 4), ()),  # patches side by side
        (nn.Conv2d(2, 3, 4, 2, dilation=2), (2, 2)),  # sees every other place only
        (nn.Conv1d(2, 3, 3, 2), (2,)),
        (nn.MaxPool2d(3, 2, ceil_mode=True), (2, 2)),
        (nn.MaxPool1d(3, 2), (2,)),
        (nn.MaxPool3d(2), ()),
        (nn.AvgPool2d(3, 2), (2, 2)),
    ],
    ids=str,
)
def test_maps_that_visit_inputs_unevenly_are_evened_in_the_plan_and_in_fact(
    layer: nn.Module, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "uneven", replace(PRESETS["relprop"], even=False))
    axes = int(type(layer).__name__[-2])
    stem = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes](1, 2, 1)
    model = nn.Sequential(stem, nn.ReLU(), layer, nn.Flatten(), nn.LazyLinear(2)).double().eval()
    x = noise(1, 1, *[9] * axes).abs()
    with torch.no_grad():
        model(x)
        for weight in model.parameters():
            weight.abs_()  # so that everything is alive
    assert ("evened" in relprop.plan(model).rows()[3]["treatment"]) == bool(steps)
    before, after = (relprop.explain(model, x, 0, preset=p, start="one").heatmap for p in ("uneven", "relprop"))
    assert torch.allclose(before, after) != bool(steps)


def test_what_is_not_active_gets_nothing_from_a_neighbour() -> None:
    """The tent weighs contributions, it does not blur relevance."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, stride=2, bias=False), nn.Flatten(), nn.Linear(9, 1)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.abs_()
    x = noise(1, 1, 6, 6).abs()
    x[..., 3] = 0
    how = {"preset": "paper", "start": "one", "overrides": {"0": rules.evened(rules.zplus())}}
    heat = relprop.explain(model, x, **how).heatmap[0]
    assert (heat[:, 3] == 0).all()
    assert (heat[:, [0, 1, 2, 4, 5]] > 0).all()


def test_a_strided_1x1_convolution_reaches_every_place_of_a_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).double().eval()
    model[0].weight.data.abs_()  # so that every output is alive
    model[0].bias.data.zero_()
    x = noise(1, 2, 6, 6).abs()
    dots = relprop.explain(model, x, start="one", overrides={"0": "z+"}).heatmap[0]
    even = relprop.explain(model, x, start="one", overrides={"0": rules.evened(rules.zplus())}).heatmap[0]
    assert (dots != 0).sum() == 9
    assert (even != 0).all()
    torch.testing.assert_close(even.sum(), dots.sum())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, 2, 1, groups=4),
        nn.Conv2d(4, 6, 5, 3, padding="valid", dilation=2, groups=2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    ],
    ids=str,
)
def test_evened_rules_lose_nothing(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), layer, nn.Flatten(), nn.LazyLinear(3)).double().eval()
    x = noise(2, 3, 14, 14)
    with torch.no_grad():
        model(x)
    e = relprop.explain(model, x, torch.tensor([[0, 2], [1, 0]]), strict=True)
    assert "evened" in relprop.plan(model, x).rows()[3]["treatment"]
    assert e.ledger.error.max() < 1e-12


def test_an_evened_gamma_asks_the_blended_outputs_for_their_sign() -> None:
    """Where the network's own output has the other sign, its boosted denominator may be anything."""
    for seed in range(100):
        linear = Convolution(noise(3, 2, 3, 3, seed=seed), None, (2, 2), [(1, 1), (1, 1)], (1, 1), 1)
        a, r = noise(1, 2, 8, 8, seed=1000 + seed).relu(), noise(1, 1, 3, 4, 4, seed=2000 + seed).abs()
        (handed,), *_ = rules.evened(rules.gamma(0.25))(linear, a, r)
        assert handed.abs().sum() < 2 * r.sum()


def test_long_axes_are_blended_as_short_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 7, 2, 3), nn.ReLU(), nn.MaxPool1d(3, 2), nn.Flatten(), nn.LazyLinear(2)
    ).double()
    x = noise(2, 1, 40)
    model.eval()(x)
    dense = relprop.explain(model, x, 0, strict=True)
    monkeypatch.setattr(tents, "LONG", 10)
    sparse = relprop.explain(deepcopy(model), x, 0, strict=True)
    torch.testing.assert_close(sparse.relevance, dense.relevance)


def test_a_model_may_see_inputs_of_several_sizes_in_turn(net: nn.Module) -> None:
    small, large = noise(1, 3, 8, 8), noise(1, 3, 11, 14)
    first = [relprop.explain(deepcopy(net), x, 1).relevance for x in (small, large)]
    for _ in range(2):
        for x, expected in zip((small, large), first, strict=True):
            assert torch.equal(relprop.explain(net, x, 1, strict=True).relevance, expected)


class Heads(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3 if gated else 6, 3)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        y: Tensor = self.one(h)
        return y * self.two(y).sigmoid() if self.gated else y + self.two(h)


def test_every_head_has_the_heads_rule_and_a_gate_is_none() -> None:
    for gated, heads in ((False, ["one", "two"]), (True, ["one"])):
        rows = relprop.plan(Heads(gated).eval()).rows()
        assert [row["node"] for row in rows if "alpha" in row["treatment"]] == heads


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


def test_classes_that_are_nearly_impossible_take_no_part_in_the_contrast(net: nn.Module) -> None:
    """Numbers near the smallest there are would make every product slow, and change nothing."""
    with torch.no_grad():
        net.fc.bias.copy_(torch.tensor([0.0, 0, -60, -700, 0]))
    begin = starts.start("contrast", torch.tensor([0]), (1, 5))
    relevance, _ = begin(net(noise(1, 3, 8, 8)).detach(), torch.tensor([0]))
    assert (relevance[0, 0, [2, 3]] == 0).all()
    assert (relevance[0, 0, [1, 4]] < 0).all()
    torch.testing.assert_close(relevance.sum(), torch.ones((), dtype=torch.float64))


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
