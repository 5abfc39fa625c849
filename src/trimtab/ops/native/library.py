"""The compiled libraries of this process, by kernel family.

`TRIMTAB_NATIVE=0` turns them all off; everything then runs in PyTorch.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

from trimtab.errors import RunError
from trimtab.ops.native.build import BuildError, build
from trimtab.user_cache import user_cache

SWITCH = "TRIMTAB_NATIVE"


def library(name: str) -> ctypes.CDLL:
    """The library of `NAME.cpp`, built if need be and loaded once in a process.

    Raises:
        RunError: it is not available here.
    """
    found = _switched_off() or _load(name)
    if isinstance(found, str):
        raise RunError(
            "TT605", f"native {name}", f"not available: {found}",
            hint="without it the same operator runs in PyTorch",
        )
    return found


def unavailable(name: str) -> str | None:
    """Why the library of `NAME.cpp` cannot run here, or None where it can."""
    found = _switched_off() or _load(name)
    return found if isinstance(found, str) else None


def _switched_off() -> str | None:
    return f"{SWITCH}=0 is set" if os.environ.get(SWITCH) == "0" else None


@cache
def _load(name: str) -> ctypes.CDLL | str:
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        path = build(source, user_cache("native"), torch.backends.cpu.get_cpu_capability())
        return ctypes.CDLL(str(path))
    except BuildError as e:
        return str(e)
    except OSError as e:
        return f"the built library does not load: {e}"
