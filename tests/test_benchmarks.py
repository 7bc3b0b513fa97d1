"""The benchmarks run; what they measure is for a quiet machine, and for a person to read."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "benchmarks" / "bench.py"


@pytest.mark.slow
def test_the_measures_table_has_every_row() -> None:
    ask = [sys.executable, BENCH, "--quick", "--only", "metrics"]
    said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    table = [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("|")]
    points = ["101 points", "26 points", "adaptive points", "101 points, quantised map, block ties"]
    assert table[2:] == ["202 plain forward passes", *points]
    assert "Score-CAM" in said
    assert "images a second" in said
    assert "**pass**" not in said
