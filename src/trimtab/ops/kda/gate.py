"""The decay gate of KDA, in log space; always <= 0."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype


def decay_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay per channel.

        z' = z + dt_bias,  a = exp(A_log[h])
        with a bound L:   g = L * sigmoid(a z')        in (L, 0); the bound scales, it does not clamp
        without:          g = -a * softplus(z')

    Args:
        z: [T, H, K], output of the decay projection.
        A_log: [H].
        dt_bias: [H * K].
        lower_bound: L, negative, or None.

    Returns:
        g [T, H, K] in at least float32.
    """
    dtype = island_dtype(z)
    a = torch.exp(A_log.to(dtype)).unsqueeze(-1)
    shifted = z.to(dtype) + dt_bias.to(dtype).view(z.shape[-2:])
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a * shifted)
    return -a * torch.nn.functional.softplus(shifted)
