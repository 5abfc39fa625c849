"""Routed experts as they are defined: a loop over tokens and their experts.

    m_t = sum_{e in idx_t} w_te * down_e( act(gate_e x_t, up_e x_t) )

The weight multiplies after the down projection, in at least float32, in ascending expert order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype


def experts_reference(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Weighted sum of the selected experts' outputs.

    Args:
        x: [T, D].
        ids: [T, A] int, ascending.
        weights: [T, A].
        gate_up: [E, 2, F, D], gate then up.
        down: [E, D, F].
        activation: act(gate, up).

    Returns:
        [T, D] in the dtype of x.
    """
    wide = island_dtype(x)
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=wide, device=x.device)
        for a, expert in enumerate(ids[t].tolist()):
            gate, up = gate_up[expert].to(x.dtype) @ x[t]
            y = down[expert].to(x.dtype) @ activation(gate, up)
            total = total + weights[t, a].to(wide) * y.to(wide)
        rows.append(total.to(x.dtype))
    return torch.stack(rows)
