"""Handing tensors to C functions."""

from __future__ import annotations

import ctypes

from torch import Tensor


def address(x: Tensor | None) -> ctypes.c_void_p:
    """Where the values of a contiguous tensor begin; a null pointer for None."""
    assert x is None or x.is_contiguous(), "kernels see contiguous memory"
    return ctypes.c_void_p(None if x is None else x.data_ptr())
