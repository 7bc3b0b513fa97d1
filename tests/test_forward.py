"""Values that are kept, and values that are computed again."""

import itertools

import pytest
import support
import torch
from torch import nn

import relprop
from relprop import plans
from relprop.forward import Forward, Record
from relprop.trace import trace


def kept(record: Record) -> int:
    return sum(v.numel() for v in record.values.values() if isinstance(v, torch.Tensor))


@pytest.mark.filterwarnings("ignore")  # what libraries remark on their own code
@pytest.mark.parametrize("preset", ["paper", "epsilon"])
@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("torchvision/resnet50", 64),
        ("torchvision/swin_t", 32),
        ("torchvision/r3d_18", 32),
        ("timm/vit_tiny_patch16_224", 32),
    ],
)
def test_what_is_computed_again_is_the_same(model: str, size: int, preset: str) -> None:
    net, x = support.build(model, size), support.sample(model, size)
    once = relprop.explain(net, x, 1, start="one", preset=preset)
    again = relprop.explain(net, x, 1, start="one", preset=preset, recompute=True, strict=True)
    torch.testing.assert_close(again.relevance, once.relevance, rtol=0, atol=1e-6 * float(once.relevance.abs().max()))
    assert torch.equal(again.output, once.output)
    torch.testing.assert_close(again.ledger.error, once.ledger.error, rtol=0, atol=1e-5)


def test_less_is_kept_when_it_is_computed_again() -> None:
    net, x = support.build("torchvision/resnet50", 64), torch.randn(2, 3, 64, 64)
    forward = Forward(plans.make(trace(net)))
    shapes = forward.shapes(x)
    with torch.no_grad():
        whole, part = forward(x), forward(x, cuts=forward.cuts(shapes))
    assert len(part.cuts) >= 4
    assert kept(part) < 0.4 * kept(whole)
    # Between two cuts lies no more than a few blocks.
    marks = [0, *part.cuts, len(shapes)]
    between = [sum(v.numel() for i, v in whole.values.items() if a < i < b) for a, b in itertools.pairwise(marks)]
    assert kept(part) + max(between) < 0.7 * kept(whole)


def test_a_net_that_cannot_be_cut_is_explained_all_the_same() -> None:
    class Tangled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.one(x).relu()
            b = self.two(a).relu()
            return self.fc((a + b + self.two(b)).mean((2, 3)) + a.mean((2, 3)))

    net, x = Tangled().eval(), torch.randn(2, 3, 6, 6)
    again = relprop.explain(net, x, 1, recompute=True)
    torch.testing.assert_close(again.relevance, relprop.explain(net, x, 1).relevance)
