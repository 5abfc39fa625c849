"""What holds for every test, whichever way pytest was started."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported: test processes run side by side, and threads that wait for a core
# spin on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that tests start find the package too, installed or not.
_SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH")]))
