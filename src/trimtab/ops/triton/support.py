"""When the Triton kernels run: on a CUDA device, where `triton` is installed.

Under `TRITON_INTERPRET=1`, which tests set in a process of their own, the kernels also run on the
CPU; no operator chooses them for that.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from trimtab.ops.registry import OpCase

_DTYPES = (torch.float32, torch.bfloat16)


def supports(case: OpCase) -> str | None:
    """Why a Triton kernel does not run a case, or None."""
    if case.device != "cuda":
        return f"runs on cuda, not on {case.device}"
    if case.dtype not in _DTYPES:
        return f"computes in float32, not {str(case.dtype).removeprefix('torch.')}"
    if find_spec("triton") is None:
        return "needs the package triton: pip install 'trimtab[triton]'"
    return None


def supports_fla(case: OpCase) -> str | None:
    """Why the KDA kernels of fla-core do not run a case, or None."""
    if case.device != "cuda":
        return f"runs on cuda, not on {case.device}"
    if case.dtype not in _DTYPES:
        return f"computes in float32, not {str(case.dtype).removeprefix('torch.')}"
    if find_spec("fla") is None:
        return "needs the package fla-core: pip install fla-core"
    return None
