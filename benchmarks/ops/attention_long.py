"""Peak memory of sparse attention over one long sequence, forward and backward, in a new process."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.harness import MIB, Result
from benchmarks.ops.attention import TOP_K, ours

LENGTH, LIMIT_MIB = 32768, 3 * 1024


def _peak(threads: int) -> int:
    torch.set_num_threads(threads)
    y, dx, _ = ours(LENGTH)()
    assert bool(y.isfinite().all() and dx.isfinite().all())
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def run() -> list[Result]:
    """One pass of the layer of `benchmarks.ops.attention` at 32768 tokens."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peak = pool.submit(_peak, torch.get_num_threads()).result()
    case = f"sparse attention fwd+bwd T{LENGTH} H8 top {TOP_K}"
    return [Result(case, "peak resident memory (MiB), all", peak / MIB, LIMIT_MIB, at_least=False)]
