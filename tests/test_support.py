"""A sample of the support matrix: one model of each kind that differs in its operators; `make support` has them all."""

from __future__ import annotations

import pytest
import support
import torch

import relprop

SAMPLE = (
    "torchvision/densenet121",  # concatenation
    "torchvision/mobilenet_v3_small",  # squeeze and excitation, hard swish
    "torchvision/shufflenet_v2_x0_5",  # channels split and shuffled
    "torchvision/convnext_tiny",  # layer norms and layer scale
    "torchvision/swin_t",  # windows that shift, masks, padding; code that needs shapes
    "torchvision/lraspp_mobilenet_v3_large",  # a dict with a map, interpolation
    "torchvision/r3d_18",  # three axes
    "timm/vit_tiny_patch16_224",  # a class token, attention
    "timm/mixer_s32_224",  # tokens mixed
    "timm/hrnet_w18_small",  # sums of many
    "timm/convnextv2_atto",  # a norm that multiplies what it was made of
)


@pytest.mark.filterwarnings("ignore")  # what libraries remark on their own code
@pytest.mark.parametrize("model", SAMPLE)
def test_a_model_is_explained_and_nothing_is_lost(model: str) -> None:
    row = support.examine(model)
    assert not row.trouble, row.trouble
    assert row.error <= 1e-5
    assert row.leak <= 1e-5
    assert row.difference <= 1e-5
    assert set(row.absorbed) <= {"constant", "padding"}
    assert sum(row.absorbed.values()) < 0.9


@pytest.mark.filterwarnings("ignore")
def test_samples_in_windows_are_as_alone() -> None:
    """Two samples together give what each gives alone, although windows and heads move them about."""
    net = support.build("torchvision/swin_t", 32)
    x = support.sample("torchvision/swin_t", 32)
    together = relprop.explain(net, x, 3, start="one")
    for k in range(len(x)):
        alone = relprop.explain(net, x[k : k + 1], 3, start="one")
        torch.testing.assert_close(together.relevance[k : k + 1], alone.relevance, rtol=1e-3, atol=1e-7)
        for cause, amount in alone.ledger.absorbed_by_cause.items():
            torch.testing.assert_close(together.ledger.absorbed_by_cause[cause][k], amount[0], rtol=1e-4, atol=1e-9)


def test_the_page_says_what_was_found() -> None:
    good = support.Row("timm/a", (2, 3, 32, 32), merges=4, traced="all shapes", error=1e-7, absorbed={"constant": 0.25})
    bad = support.Row("timm/b", (2, 3, 64, 64), "fold has no rule | at all")
    page = support.page([good, bad])
    assert "1 of 2 models pass" in page
    assert "| timm/a | 3x32x32 | yes | all shapes | 4 | 0 | 1e-07 |" in page
    assert "constant 0.25" in page
    assert "| timm/b | 3x64x64 | fold has no rule / at all |" in page
