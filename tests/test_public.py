"""Public names do not change unless the changelog says so."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from public import RECORD, changes, listing, unnamed

CHANGELOG = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def now() -> dict[str, str]:
    return listing()


def test_public_names_are_as_recorded_or_in_the_changelog(now: dict[str, str]) -> None:
    assert unnamed(json.loads(RECORD.read_text(encoding="utf-8")), now, CHANGELOG) == []


def test_the_listing_has_functions_methods_and_adapters(now: dict[str, str]) -> None:
    assert "preset: 'str' = 'relprop'" in now["relprop.explain"]
    assert now["relprop.Explanation.heatmap"] == "property"
    assert now["relprop.Explanation.load"].startswith("(cls, folder")
    assert "attribute_to_layer_input: 'bool' = False" in now["relprop.adapters.captum.LayerLRP.attribute"]
    assert "relprop.adapters.grad_cam.LRP.__call__" in now
    assert not any("._" in name and "__call__" not in name for name in now)


HEAD = "# Changelog\n\n## [Unreleased]\n\n"


@pytest.mark.parametrize(
    ("change", "name", "what"),
    [
        (lambda names: names.pop("relprop.plan"), "relprop.plan", "was removed"),
        (lambda names: names.update({"relprop.why": "()"}), "relprop.why", "was added"),
        (lambda names: names.update({"relprop.explain": "(model)"}), "relprop.explain", "was (model: 'Any'"),
        (lambda names: names.pop("relprop.Explanation.save"), "relprop.Explanation.save", "was removed"),
        (
            lambda names: names.update({"relprop.adapters.zennit.Attributor": "(net)"}),
            "relprop.adapters.zennit.Attributor",
            "was (model: 'Any'",
        ),
    ],
)
def test_a_change_without_a_word_is_noticed(
    now: dict[str, str], change: Callable[[dict[str, str]], None], name: str, what: str
) -> None:
    changed = dict(now)
    change(changed)
    (sentence,) = unnamed(now, changed, HEAD)
    assert sentence.startswith(f"{name} {what}")
    assert unnamed(now, changed, f"{HEAD}- `{name}` is another now.\n") == []
    assert unnamed(now, changed, f"{HEAD}- `{name}` is another now.\n\n## [0.1.0]\n") == []
    for elsewhere in (f"- `{name}er` is new.", f"- `{name}.more` is new.", f"\n## [0.1.0]\n\n- `{name}` was new."):
        assert unnamed(now, changed, HEAD + elsewhere) == [sentence]


def test_a_class_that_goes_is_named_once(now: dict[str, str]) -> None:
    without = {name: signature for name, signature in now.items() if not name.startswith("relprop.Explanation")}
    assert changes(now, without) == {"relprop.Explanation": "was removed"}
    assert changes(without, now) == {"relprop.Explanation": "was added"}
    assert changes(now, now) == {}
