"""What a process does with memory that it has freed."""

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from vitlab.runs.processes import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    parts = [torch.ones(4 << 20) for _ in range(6)]  # 16 MiB each
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults of glibc's allocator")
@pytest.mark.rare
def test_a_step_finds_the_memory_that_the_one_before_has_freed():
    faults = {}
    for way in ("keep", "return"):
        words = [sys.executable, "-c", STEPS, way]
        faults[way] = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert faults["keep"] * 3 < faults["return"], faults  # a machine short of memory takes some of it away
