"""Memory that is kept for the next layer."""

import subprocess
import sys

import pytest

COUNT = """
import resource, sys
import torch
from relprop.memory import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
for _ in range(20):  # the heap grows to its size with the first few
    torch.ones(8 << 20).sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(8 << 20).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator of glibc")
def test_freed_buffers_are_not_mapped_anew() -> None:
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, check=True).stdout)

    assert faults("keep") < faults("hand back") / 3
