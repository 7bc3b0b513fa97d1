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
torch.ones(8 << 20).sum()
counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(20):
    torch.ones(8 << 20).sum()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(sorted(after - before for before, after in zip(counts, counts[1:]))[10])  # the system may take pages away, too
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator of glibc")
def test_freed_buffers_are_not_mapped_anew() -> None:
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, check=True).stdout)

    assert faults("keep") < faults("hand back") / 3
