"""What comes with a release: versions that agree, and files that machines read."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import relprop

ROOT = Path(__file__).parent.parent
SEMANTIC = r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?"


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_versions_agree() -> None:
    assert re.fullmatch(SEMANTIC, relprop.__version__)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{relprop.__version__}"\n' in project
    assert read("CITATION.cff")["version"] == relprop.__version__


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    assert all(re.fullmatch(rf"\[{SEMANTIC}\] - \d{{4}}-\d\d-\d\d", section) for section in sections[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_the_citation_names_the_paper() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert paper["title"] == "Layer-Wise Relevance Propagation with Conservation Property for ResNet"
    assert [a["family-names"] for a in paper["authors"]][::6] == ["Otsuki", "Sugiura"]


def test_the_notice_tells_whose_statement_it_is() -> None:
    notice = " ".join((ROOT / "NOTICE").read_text(encoding="utf-8").split())
    assert "README of the LXT project" in notice
    assert "check before commercial use" in notice


def test_the_workflow_runs_what_everybody_runs() -> None:
    job = read(".github/workflows/test.yml")["jobs"]["test"]
    assert any(step.get("run", "").startswith("make test") for step in job["steps"])
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest is not None
    assert job["strategy"]["matrix"]["python"][0] == oldest[1]


@pytest.mark.parametrize("name", ["bug", "wrong-number", "new-operator"])
def test_issue_forms_have_what_their_readers_need(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    assert all({"type", "attributes"} <= field.keys() and field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])
