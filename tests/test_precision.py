"""Precision: float32 stays float32 unless a user asks for less, and then the ledger tells."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import relprop
from relprop.precision import precision


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_float32_is_not_shortened_on_an_accelerator() -> None:
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = flags()
    try:
        matmul.allow_tf32 = convolutions.allow_tf32 = True
        with precision(torch.device("cuda")):
            assert flags() == (False, False)
        assert flags() == (True, True)
        with pytest.raises(RuntimeError), precision(torch.device("cuda")):
            raise RuntimeError
        assert flags() == (True, True)
        with precision(torch.device("cpu")):
            assert flags() == (True, True)
        matmul.allow_tf32 = convolutions.allow_tf32 = False
        with precision(torch.device("cuda"), "tf32"):
            assert flags() == (True, True)
        assert flags() == (False, False)
    finally:
        matmul.allow_tf32, convolutions.allow_tf32 = before


def test_autocast_is_coarser_tells_so_and_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
    net, x = nn.Sequential(*layers, nn.Linear(16 * 8 * 8, 4)).eval(), torch.rand(2, 3, 12, 12)
    exact = relprop.explain(net, x, preset="paper")
    coarse = relprop.explain(net, x, preset="paper", autocast="bfloat16")
    again = relprop.explain(net, x, preset="paper")
    largest = exact.relevance.abs().max()
    assert 1e-5 < (coarse.relevance - exact.relevance).abs().max() / largest < 5e-2
    assert float(exact.ledger.error.max()) < 1e-6 < float(coarse.ledger.error.max()) < 2e-2
    assert coarse.settings["autocast"] == "bfloat16"
    assert "autocast" not in exact.settings
    assert torch.equal(again.relevance, exact.relevance)
    with pytest.raises(relprop.RelpropError, match="leak"):
        relprop.explain(net, x, preset="paper", autocast="bfloat16", strict=True)


@pytest.mark.parametrize("preset", ["paper", "relprop"])
def test_a_coarse_call_that_comes_first_leaves_nothing_behind(preset: str) -> None:
    """Not in what is kept for the next call either: sums of ones, and how many inputs dead outputs have."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU(), nn.Flatten()]
    net, x = nn.Sequential(*layers, nn.Linear(16 * 5 * 5, 4)).eval(), torch.rand(2, 3, 24, 24)
    with torch.no_grad():
        layers[2].weight[::2] = -layers[2].weight[::2].abs()  # such outputs hand relevance out evenly
    exact = relprop.explain(deepcopy(net), x, preset=preset)
    relprop.explain(net, x, preset=preset, autocast="bfloat16")
    assert torch.equal(relprop.explain(net, x, preset=preset, strict=True).relevance, exact.relevance)


def test_doubles_are_not_rounded() -> None:
    net, x = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double().eval(), torch.rand(1, 1, 4, 4)
    exact = relprop.explain(net, x.double())
    assert torch.equal(relprop.explain(net, x.double(), autocast="bfloat16").relevance, exact.relevance)


def test_an_unknown_autocast_is_refused() -> None:
    with pytest.raises(relprop.RelpropError, match="'float8' is unknown; pass 'bfloat16', 'tf32' or None"):
        relprop.explain(nn.Flatten().eval(), torch.rand(1, 2, 2), autocast="float8")  # type: ignore[arg-type] # that is the point
