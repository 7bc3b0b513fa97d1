"""A sample of the support matrix: one model of each kind that differs in its operators; `make support` has them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import frozen
import pytest
import support
import torch
from torch import Tensor, nn

import relprop
from relprop import rules
from relprop.mapped import BatchNorm
from relprop.merges import SIGNED
from relprop.norms import Norm

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
def test_rows_are_kept_and_the_last_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "ROWS", tmp_path / "rows.jsonl")
    assert support.kept() == {}
    for models in (["timm/lcnet_050"], ["timm/nothing", "timm/lcnet_050"]):
        support._work(models)
    assert len(support.ROWS.read_text().splitlines()) == 3
    (row,) = support.kept().values()  # what is not in the list is left out
    assert (row.model, row.shape, row.trouble) == ("timm/lcnet_050", (2, 3, 32, 32), "")
    assert row.cost > 1


EXACT = rules.epsilon(1e-14)

REFERENCED = {
    "timm/vit_tiny_patch16_224": (False, True),
    "torchvision/swin_t": (False, True),
    "timm/convnext_atto": (False, True),
    "timm/mixer_s32_224": (False, True),
    "timm/coatnet_pico_rw_224": (False, True),  # gates, convolutions and attention with positions
    "timm/xcit_nano_12_p8_224": (False, True),  # attention of channels
    "timm/cait_xxs24_224": (False, True),  # heads that talk
    "torchvision/efficientnet_b0": (False, True),
    "torchvision/densenet121": (False,),  # a unit of zeros only can be handed nothing by a gradient
    "timm/resnest14d": (False,),
    "torchvision/shufflenet_v2_x0_5": (False,),
}
"""Models, and under which rules they are compared: epsilon, and the paper's."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "paper"), [(model, paper) for model, both in REFERENCED.items() for paper in both])
def test_relevance_is_that_of_frozen_gradients(model: str, paper: bool) -> None:
    net = support.build(model, support.MODELS[model]).double()
    x = support.sample(model, support.MODELS[model], 1).double()
    ours, output = _exactly(net, x, paper)
    theirs, expected = frozen.relevance(net, x, 1, paper=paper)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-6


def _exactly(net: nn.Module, x: Tensor, paper: bool) -> tuple[Tensor, Tensor]:
    """Relevance of the first class' neighbour from its logit, with no stabiliser to speak of, and the output."""
    graph = relprop.plan(net, x).graph
    if paper:
        options = {"preset": "paper", "overrides": {node.name: "z+" for node in graph if node.first}}
    else:
        norms = [n.name for n in graph if isinstance(n.operator, Norm | BatchNorm) and n.folds is None]
        options = {"preset": "epsilon", "split": replace(SIGNED, epsilon=1e-14)}
        options["overrides"] = {"*": EXACT, **dict.fromkeys(norms, EXACT)}
    e = relprop.explain(net, x, 1, start="logit", **options)
    return e.relevance, e.output


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
