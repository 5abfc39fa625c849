"""Norms: RMS norm, gated RMS norm, L2 norm and layer norm, each with its own eps.

Statistics are taken in at least float32; the RMS gain multiplies in the activation dtype, the
gated norm's in the island.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * cast(x / sqrt(mean(x^2) + eps)) over the last dimension.

    Args:
        x: [..., D].
        weight: [D], a plain gain.
        eps: added to the mean square.
    """
    wide = x.to(island_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """cast(w * x / sqrt(mean(x^2) + eps) * sigmoid(gate)) per head: norm first, then gate.

    Args:
        x: [..., V], output of the linear attention.
        gate: [..., V], before the sigmoid.
        weight: [V], shared by all heads.
        eps: added to the mean square.

    Returns:
        [..., V] in the dtype of `gate`.
    """
    dtype = island_dtype(gate)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(dtype) * normed * torch.sigmoid(gate.to(dtype))).to(gate.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension; eps is added to the sum.

    Returns:
        Same shape, in the island dtype.
    """
    wide = x.to(island_dtype(x))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last dimension."""
    wide = x.to(island_dtype(x))
    dtype = wide.dtype
    normed = torch.nn.functional.layer_norm(
        wide, wide.shape[-1:], weight.to(dtype), bias.to(dtype), eps
    )
    return normed.to(x.dtype)
