"""Memory that a process gives back: the C library's allocator on the CPU.

glibc raises the size from which a block gets pages of its own to that of the largest block freed so
far, up to 32 MiB, and takes everything smaller from its heap. Aligned blocks, which tensors are, do
not fit the holes that freed ones left, so that the heap of a training step grows to several times
what is alive. A fixed size keeps activations out of the heap; huge pages keep that cheap.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Blocks from this size on go back to the system when they are freed.
BLOCK_BYTES = 2**20
_M_MMAP_THRESHOLD = -3
_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def give_blocks_back() -> bool:
    """Let blocks of 1 MiB and more go back to the system; whether the C library took it.

    Does nothing where another C library runs, or where the environment already says something.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _BY_USER):
        return False
    # A block's first touch faults once per 2 MiB instead of once per 4 KiB; torch reads this once.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES) == 1
