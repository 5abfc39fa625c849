"""Peak memory of this process, on each platform.

Knows: where Linux and other systems keep the number. Does not know: what used the memory.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_gib(status: Path = _STATUS) -> float:
    """Highest resident memory of this process so far, in GiB.

    Args:
        status: Linux's file of the process; where there is none, `getrusage` answers.
    """
    peak = _peak_of_status(status)
    return (peak if peak is not None else rusage_peak_bytes(sys.platform)) / 2**30


def rusage_peak_bytes(platform: str) -> int:
    """The fallback, which on Linux may include the program that started this one.

    Args:
        platform: as `sys.platform`; macOS counts bytes, the others KiB.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform == "darwin" else peak * 1024


def _peak_of_status(status: Path) -> int | None:
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None
