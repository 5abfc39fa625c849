"""The allocator gives large blocks back, and leaves a user's own setting alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import re, torch
from trimtab.train.allocator import give_blocks_back
print(int(give_blocks_back()))
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
torch.ones(16 * 2**20).clone()  # a large one first, which would raise the threshold
before = resident()
blocks = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
last = blocks[-1]
del blocks
print(resident() - before)
"""


def run(**environment: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
                          env={**os.environ, **environment})
    took, grown = done.stdout.split()
    return int(took), int(grown)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_blocks_leave_the_process() -> None:
    took, grown = run()
    assert took == 1
    assert grown < 32


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_setting_of_the_environment_stays() -> None:
    assert run(MALLOC_MMAP_THRESHOLD_="65536")[0] == 0
