"""Which rule or split every node gets: presets, overrides, and the table that a person reads before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relprop
from relprop import rules
from relprop.presets import PRESETS

MakeModel = Callable[..., nn.Module]
RESNET50_BLOCKS = 16


@pytest.fixture(scope="module")
def resnet50(torchvision_model: MakeModel) -> nn.Module:
    return torchvision_model("resnet50")


@pytest.fixture(scope="module")
def vgg16_bn(torchvision_model: MakeModel) -> nn.Module:
    return torchvision_model("vgg16_bn")


@pytest.fixture(autouse=True)
def _the_same_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.layer = nn.Sequential(Block(), Block(), Block())
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gap(self.layer(self.pool(self.stem(x)))).flatten(1))


@pytest.fixture
def small() -> nn.Module:
    model = Small().eval()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()
                m.weight.normal_()
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))


def table(model: nn.Module, **options: Any) -> dict[str, str]:
    """From each node to what it gets."""
    return {row["node"]: row["treatment"] for row in relprop.plan(model, **options).rows()}


def kinds(model: nn.Module, **options: Any) -> dict[str, set[str]]:
    """From each kind of operator to all that its nodes get, first maps apart."""
    plan = relprop.plan(model, **options)
    found: dict[str, set[str]] = {}
    for node, row in zip(plan.graph, plan.rows(), strict=True):
        treatment = "folded" if row["treatment"].startswith("folded into") else row["treatment"]
        found.setdefault("first" if node.first else row["operator"], set()).add(treatment)
    return found


# -- presets ----------------------------------------------------------------------------------------------------------

NOTHING = {"input": {""}, "relu": {""}, "flatten": {""}}


def test_relprop(resnet50: nn.Module) -> None:
    assert kinds(resnet50) == NOTHING | {
        "first": {"w+, evened"},
        "conv2d": {"z+", "z+, evened"},
        "linear": {"alpha3beta2"},
        "adaptive_avg_pool2d": {"z+"},
        "max_pool2d": {"average, z+, evened"},
        "batch_norm": {"pass"},
        "add": {"symmetric", "ratio"},
    }
    found = relprop.plan(resnet50).rows()
    strided = {f"layer{stage}.0.{name}" for stage in (2, 3, 4) for name in ("conv2", "downsample.0")}
    assert {row["node"] for row in found if row["treatment"] == "z+, evened"} == strided
    merges = {row["merge"]: row["treatment"] for row in found if row["merge"]}
    assert merges == {n: "symmetric" if n <= RESNET50_BLOCKS // 2 else "ratio" for n in range(1, RESNET50_BLOCKS + 1)}


def test_the_split_that_is_asked_for_holds_in_both_halves(resnet50: nn.Module) -> None:
    assert kinds(resnet50, split="ratio")["add"] == {"ratio"}


def test_paper(resnet50: nn.Module) -> None:
    assert kinds(resnet50, preset="paper") == NOTHING | {
        "first": {"w+"},
        "conv2d": {"z+"},
        "linear": {"z+"},
        "adaptive_avg_pool2d": {"z+"},
        "max_pool2d": {"average, z+"},
        "batch_norm": {"pass"},
        "add": {"ratio"},
    }


def test_released(resnet50: nn.Module) -> None:
    assert kinds(resnet50, preset="released") == NOTHING | {
        "first": {"w+ (+1e-05)"},
        "conv2d": {"z+ (+1e-05)"},
        "linear": {"z+ (+1e-05)"},
        "adaptive_avg_pool2d": {"z+ (+1e-05)"},
        "max_pool2d": {"average-2x2, z+ (+1e-05)"},
        "batch_norm": {"pass"},
        "add": {"ratio"},
    }


@pytest.mark.parametrize(
    ("preset", "below", "above", "norm"),
    [("mixture", "z+", "epsilon(", "folded into "), ("released-mixture", "z+ (+1e-05)", "epsilon(+1e-05)", "pass")],
)
def test_mixtures_change_after_the_eighth_of_sixteen_blocks(
    resnet50: nn.Module, preset: str, below: str, above: str, norm: str
) -> None:
    plan = relprop.plan(resnet50, preset=preset)
    assert plan.graph.merges == RESNET50_BLOCKS
    rows = {row["node"]: row for row in plan.rows()}
    maps = [row for row in rows.values() if row["operator"] == "conv2d" and row["block"]]
    assert {row["treatment"] for row in maps if row["block"] <= 8} == {below}
    upper = {row["treatment"] for row in maps if row["block"] > 8}
    assert len(upper) == 1
    assert upper.pop().startswith(above)
    for name in ("fc", "avgpool", "layer3.1.conv1", "layer4.0.downsample.0"):
        assert rows[name]["treatment"].startswith(above), name
    for name in ("layer3.0.conv3", "layer3.0.downsample.0", "layer1.0.conv1"):
        assert rows[name]["treatment"] == below, name
    assert rows["conv1"]["treatment"].startswith("w+")
    assert rows["layer3.0.bn3"]["treatment"] == "pass"
    assert rows["layer3.1.bn1"]["treatment"].startswith(norm)
    assert {row["treatment"] for row in rows.values() if row["merge"]} == {"ratio"}
    assert rows["maxpool"]["treatment"].startswith("average")


def test_epsilon(resnet50: nn.Module) -> None:
    assert kinds(resnet50, preset="epsilon") == NOTHING | {
        "first": {"epsilon(1e-06)"},
        "conv2d": {"epsilon(1e-06)"},
        "linear": {"epsilon(1e-06)"},
        "adaptive_avg_pool2d": {"epsilon(1e-06)"},
        "max_pool2d": {"winner"},
        "batch_norm": {"folded"},
        "add": {"signed"},
    }


@pytest.mark.parametrize(
    ("preset", "first", "conv"),
    [("epsilon-plus-flat", "flat", "z+ (+1e-06)"), ("epsilon-gamma-box", "zB", "gamma(0.25)")],
)
def test_zennits_composites(vgg16_bn: nn.Module, preset: str, first: str, conv: str) -> None:
    found = kinds(vgg16_bn, preset=preset)
    assert found["conv2d"] == {conv}
    assert found["linear"] == {"epsilon(1e-06)"}
    assert found["batch_norm"] == {"folded"}
    assert found["max_pool2d"] == {"winner"}
    assert len(found["first"]) == 1
    assert found["first"].pop().startswith(first)


def test_a_net_without_blocks_is_halved_by_its_maps(vgg16_bn: nn.Module) -> None:
    plan = relprop.plan(vgg16_bn, preset="mixture")
    maps = [row["treatment"] for row in plan.rows() if row["operator"] in ("conv2d", "linear")]
    assert len(maps) == 16
    assert maps[0] == "w+"
    assert maps[1:8] == ["z+"] * 7
    assert all(treatment.startswith("epsilon(") for treatment in maps[8:])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_and_accounts_for_everything(small: nn.Module, preset: str) -> None:
    e = relprop.explain(small, images(), preset=preset)
    assert torch.isfinite(e.relevance).all()
    assert e.ledger.max_leak <= 1e-4
    assert e.settings["preset"] == preset


def test_splits_replace_the_presets(resnet50: nn.Module) -> None:
    for split in ("symmetric", "signed", "main-only", "ratio"):
        assert kinds(resnet50, split=split)["add"] == {split}
    assert kinds(resnet50, preset="epsilon", split="ratio")["add"] == {"ratio"}

    def halves(branches: tuple[Tensor, ...]) -> list[float]:
        return [1 / len(branches) for _ in branches]

    assert kinds(resnet50, split=halves)["add"] == {"halves"}


def test_identity_skips_out_are_written_where_there_are_any(resnet50: nn.Module) -> None:
    plan = relprop.plan(resnet50, preset="paper", identity_skips=False)
    found = {row["merge"]: row["treatment"] for row in plan.rows() if row["merge"]}
    projections = {1, 4, 8, 14}
    assert {merge for merge, text in found.items() if text == "ratio"} == projections
    assert {merge for merge, text in found.items() if text == "ratio, identity skips out"} == set(found) - projections


# -- overrides --------------------------------------------------------------------------------------------------------


def changed(model: nn.Module, overrides: dict[Any, Any], **options: Any) -> dict[str, str]:
    """What overrides change in a plan's table."""
    before, after = table(model, **options), table(model, overrides=overrides, **options)
    return {name: after[name] for name in before if after[name] != before[name]}


def test_override_of_one_name(small: nn.Module) -> None:
    assert changed(small, {"stem.0": "flat"}) == {"stem.0": "flat"}
    assert changed(small, {"layer.1.conv": rules.gamma(0.5)}) == {"layer.1.conv": "gamma(0.5)"}


def test_override_by_pattern(small: nn.Module) -> None:
    assert changed(small, {"layer.*": "epsilon"}) == {f"layer.{i}.conv": "epsilon(1e-06)" for i in range(3)}
    assert changed(small, {"*.conv": "w2"}) == {f"layer.{i}.conv": "w2" for i in range(3)}
    assert changed(small, {"layer.[12].*": "signed"}) == {f"layer.{i}.add": "signed" for i in (1, 2)}


def test_override_of_a_whole_module(small: nn.Module) -> None:
    assert changed(small, {"layer.1": "epsilon"}) == {"layer.1.conv": "epsilon(1e-06)"}
    assert changed(small, {"layer": "main-only"}) == {f"layer.{i}.add": "main-only" for i in range(3)}


def test_override_by_type(small: nn.Module) -> None:
    assert changed(small, {nn.Linear: "epsilon"}) == {"fc": "epsilon(1e-06)"}
    assert changed(small, {nn.MaxPool2d: "winner"}) == {"pool": "winner"}
    convs = {"stem.0", *(f"layer.{i}.conv" for i in range(3))}
    assert changed(small, {nn.Conv2d: "flat"}) == dict.fromkeys(convs, "flat")
    assert set(changed(small, {nn.Module: "flat"})) == {*convs, "gap", "fc"}


def test_override_by_the_type_of_an_enclosing_module(small: nn.Module) -> None:
    assert changed(small, {Block: "epsilon"}) == {f"layer.{i}.conv": "epsilon(1e-06)" for i in range(3)}


def test_override_by_block(small: nn.Module) -> None:
    assert changed(small, {2: "epsilon"}) == {"layer.1.conv": "epsilon(1e-06)"}
    assert changed(small, {3: "symmetric"}) == {"layer.2.add": "symmetric"}


def test_override_of_batch_norms(small: nn.Module) -> None:
    folded = {"stem.1": "folded into stem.0", **{f"layer.{i}.bn": f"folded into layer.{i}.conv" for i in range(3)}}
    assert changed(small, {nn.BatchNorm2d: "fold"}) == folded
    assert changed(small, {"*": "fold"}) == folded
    assert changed(small, {"layer.0.bn": "pass"}, preset="epsilon") == {"layer.0.bn": "pass"}
    assert changed(small, {"stem.1": "epsilon"}) == {"stem.1": "epsilon(1e-06)"}


def test_a_batch_norm_with_nothing_to_fold_into_is_a_map_of_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    for norm in ("0", "3"):
        assert table(model, preset="epsilon")[norm] == "epsilon(1e-06)"
        assert table(model, overrides={norm: "fold"})[norm] == "epsilon(1e-06)"
        assert table(model)[norm] == "pass"


def test_override_of_pools(small: nn.Module) -> None:
    assert changed(small, {"pool": "average-2x2"}) == {"pool": "average-2x2, z+ (+1e-05)"}
    assert changed(small, {"pool": "average"}, preset="epsilon") == {"pool": "average, z+"}
    assert changed(small, {"gap": "epsilon"}) == {"gap": "epsilon(1e-06)"}


def test_later_overrides_win(small: nn.Module) -> None:
    wide, narrow = {"layer.*": "epsilon"}, {"layer.1.conv": "gamma"}
    both = table(small, overrides=wide | narrow)
    assert (both["layer.0.conv"], both["layer.1.conv"]) == ("epsilon(1e-06)", "gamma(0.25)")
    other = table(small, overrides=narrow | wide)
    assert (other["layer.0.conv"], other["layer.1.conv"]) == ("epsilon(1e-06)", "epsilon(1e-06)")
    assert table(small, overrides={1: "signed", "layer.0.add": "main-only"})["layer.0.add"] == "main-only"


def test_overrides_of_different_kinds_do_not_meet(small: nn.Module) -> None:
    overrides = {"layer.*": "epsilon", "layer.1.*": "signed", nn.MaxPool2d: "winner", 3: "fold"}
    after = changed(small, overrides)
    assert after == {
        **{f"layer.{i}.conv": "epsilon(1e-06)" for i in range(3)},
        "layer.1.add": "signed",
        "pool": "winner",
        "layer.2.bn": "folded into layer.2.conv",
    }


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("zplus", "z+"), ("z+", "z+"), ("alpha1beta0", "z+"), ("alpha2beta1", "alpha2beta1"), ("flat", "flat"),
        ("w2", "w2"), ("wplus", "w+"), ("w+", "w+"), ("gamma", "gamma(0.25)"), ("epsilon", "epsilon(1e-06)"),
        ("zbox", "zB"), ("zB", "zB"),
    ],
)  # fmt: skip
def test_rules_by_name(small: nn.Module, word: str, name: str) -> None:
    assert table(small, preset="epsilon-gamma-box", overrides={"layer.0.conv": word})["layer.0.conv"] == name


def test_an_override_changes_the_map_where_it_says(small: nn.Module) -> None:
    plain = relprop.explain(small, images(), 1, start="one", layers=["fc", "layer.2", "layer.1"])
    e = relprop.explain(
        small, images(), 1, start="one", layers=["fc", "layer.2", "layer.1"], overrides={"layer.2.add": "main-only"}
    )
    assert torch.equal(e.relevance_at("fc"), plain.relevance_at("fc"))
    assert not torch.allclose(e.relevance_at("layer.2"), plain.relevance_at("layer.2"))
    assert e.ledger.at("layer.2.conv").received.tolist() == pytest.approx([1.0, 1.0], rel=1e-5)
    assert (plain.ledger.at("layer.2.conv").received < 0.999).all()
    assert e.settings["overrides"] == {"layer.2.add": "main-only"}


def test_plans_of_one_model_do_not_get_mixed_up(small: nn.Module) -> None:
    first = relprop.explain(small, images(), 1).relevance
    other = relprop.explain(small, images(), 1, overrides={"fc": "epsilon"}).relevance
    third = relprop.explain(small, images(), 1, overrides={"fc": rules.epsilon(0.5)}).relevance
    assert not torch.allclose(first, other)
    assert not torch.allclose(other, third)
    assert torch.equal(relprop.explain(small, images(), 1).relevance, first)
    assert torch.equal(relprop.explain(small, images(), 1, overrides={"fc": rules.epsilon(0.5)}).relevance, third)
    assert not torch.allclose(relprop.explain(small, images(), 1, identity_skips=False).relevance, first)


# -- the table --------------------------------------------------------------------------------------------------------


def test_print_has_a_line_for_every_node(resnet50: nn.Module) -> None:
    plan = relprop.plan(resnet50, preset="mixture")
    lines = str(plan).splitlines()
    assert lines[0].split() == ["node", "operator", "block", "treatment"]
    assert [line.split()[0] for line in lines[1:]] == [node.name for node in plan.graph]
    by_name = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert by_name["layer3.0.add"] == ["add", "8", "merge", "ratio"]
    assert by_name["layer3.1.bn1"] == ["batch_norm", "9", "folded", "into", "layer3.1.conv1"]
    assert by_name["conv1"] == ["conv2d", "w+"]
    assert by_name["relu"] == ["relu"]


def test_columns_are_aligned(resnet50: nn.Module) -> None:
    lines = str(relprop.plan(resnet50)).splitlines()
    column = lines[0].index("operator")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_an_input_gives_shapes(small: nn.Module) -> None:
    assert all(row["shape"] is None for row in relprop.plan(small).rows())
    plan = relprop.plan(small, images())
    shapes = {row["node"]: row["shape"] for row in plan.rows()}
    assert shapes["input"] == [2, 3, 10, 10]
    assert shapes["stem.0"] == [2, 4, 8, 8]
    assert shapes["pool"] == [2, 4, 4, 4]
    assert shapes["flatten"] == [2, 4]
    assert shapes["fc"] == [2, 3]
    lines = {line.split()[0]: line.split() for line in str(plan).splitlines()}
    assert "4x8x8" in lines["stem.0"]
    assert all(row["shape"] is None for row in relprop.plan(small).rows())  # the plan without an input is as it was


def test_rows_are_json(resnet50: nn.Module) -> None:
    plan = relprop.plan(resnet50, torch.zeros(1, 3, 64, 64), overrides={nn.Linear: rules.epsilon(0.1), 3: "symmetric"})
    rows = plan.rows()
    assert json.loads(json.dumps(rows)) == rows
    assert json.loads(json.dumps(plan.settings)) == plan.settings
    assert len(rows) == len(plan.graph)
    conv = next(row for row in rows if row["node"] == "layer1.0.conv1")
    assert conv == {
        "node": "layer1.0.conv1",
        "operator": "conv2d",
        "block": 1,
        "merge": None,
        "shape": [1, 64, 16, 16],
        "treatment": "z+",
        "source": conv["source"],
    }
    assert conv["source"].startswith("resnet.py:")


def test_the_plan_is_the_one_that_is_run(small: nn.Module) -> None:
    plan = relprop.plan(small, preset="mixture")
    e = relprop.explain(small, images(), preset="mixture")
    assert e.ledger.nodes == tuple(node.name for node in plan.graph)
    causes = {name: set(e.ledger.at(name).absorbed) for name in e.ledger.nodes}
    stabilised = {name for name, treatment in table(small, preset="mixture").items() if "epsilon" in treatment}
    assert {name for name, found in causes.items() if "epsilon" in found} == stabilised


def test_the_released_pool_is_refused_by_plan_where_shapes_do_not_fit() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(4 * 9, 3)).eval()
    x = torch.zeros(1, 3, 10, 10)
    assert table(model, preset="released")["1"].startswith("average-2x2")  # without an input there are no shapes
    with pytest.raises(relprop.RelpropError, match=r"average-2x2 cannot stand for 1.*\(1, 4, 8, 8\).*preset='paper'"):
        relprop.plan(model, x, preset="released")
    assert relprop.plan(model, x).shapes[-1] == (1, 3)


def test_arithmetic_on_shapes_is_not_printed() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.reshape(x.shape[0], x.shape[1] * x.shape[2]))

    plan = relprop.plan(Sized().eval(), torch.rand(2, 3, 4))
    printed = [line.split()[0] for line in str(plan).splitlines()[1:]]
    assert printed == ["input", "reshape", "fc"]
    assert len(plan.rows()) > len(printed)
