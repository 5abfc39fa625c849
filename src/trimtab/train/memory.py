"""Resident memory of this process, now and at its peak, and what the machine has left.

Knows: where Linux and other systems keep the numbers. Does not know: what used the memory.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MACHINE = Path("/proc/meminfo")


def peak_memory_gib(status: Path = _STATUS) -> float:
    """Highest resident memory of this process so far, in GiB.

    Args:
        status: Linux's file of the process; where there is none, `getrusage` answers.
    """
    peak = _read(status, "VmHWM")
    return (peak if peak is not None else rusage_peak_bytes(sys.platform)) / 2**30


def rusage_peak_bytes(platform: str) -> int:
    """The fallback, which on Linux may include the program that started this one.

    Args:
        platform: as `sys.platform`; macOS counts bytes, the others KiB.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform == "darwin" else peak * 1024


def resident_bytes(status: Path = _STATUS) -> int | None:
    """Resident memory of this process now; None where Linux's file is missing."""
    return _read(status, "VmRSS")


def available_bytes(machine: Path = _MACHINE) -> int | None:
    """What processes can still take without swapping; None where Linux's file is missing."""
    return _read(machine, "MemAvailable")


def _read(path: Path, key: str) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None
