"""Precision: where and how operators leave the activation dtype.

Knows: the upcast rule of dtype islands and matrix products in storage dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def island_dtype(x: Tensor) -> torch.dtype:
    """The dtype of an island that needs at least float32; float64 stays float64."""
    return torch.promote_types(x.dtype, torch.float32)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with the weight in its storage dtype and the result in x's dtype.

    A CPU multiplies bfloat16 about ten times slower than float32, so there bfloat16 rounds
    storage and activations and the product runs in float32.

    Args:
        x: [..., in], compute dtype.
        weight: [out, in], any floating dtype.

    Returns:
        [..., out], dtype of x.
    """
    if x.device.type == "cpu" and x.dtype is torch.bfloat16:
        wide = island_dtype(x)
        return functional.linear(x.to(wide), weight.to(wide)).to(x.dtype)
    return functional.linear(x, weight.to(x.dtype))
