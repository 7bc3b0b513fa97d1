"""Memory that is kept for the next layer."""

import subprocess
import sys
from pathlib import Path

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


FLAGS = """
import re
import torch
from relprop.memory import keep_freed
assert keep_freed()
assert keep_freed()  # asking twice takes no more
here = torch.ones(8 << 20).data_ptr() + (16 << 20)
with open("/proc/self/smaps") as file:
    areas = re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
sizes = 0
for area in areas:
    begin, end = (int(number, 16) for number in area.split()[0].split("-"))
    sizes += end - begin if "[heap]" in area.splitlines()[0] else 0
    if begin <= here < end:
        print(area.split("VmFlags:")[1])
print(sizes)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs a Linux with large pages")
def test_large_pages_are_asked_for() -> None:
    run = subprocess.run([sys.executable, "-c", FLAGS], capture_output=True, check=True, text=True)
    flags, size = run.stdout.splitlines()
    assert "hg" in flags.split()
    assert int(size) < 2 << 30
