"""KDA for decoding: one token for each of N sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance every sequence by one token; the equation of `reference`.

    Args:
        q: [N, H, K].
        k: [N, H, K].
        v: [N, H, V].
        g: [N, H, K], log decay.
        beta: [N, H].
        scale: factor on q.
        state: [N, H, K, V].

    Returns:
        o [N, H, V] and the new state.
    """
    decayed = torch.exp(g).unsqueeze(-1) * state
    error = v - (k.unsqueeze(-2) @ decayed).squeeze(-2)
    new = decayed + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return ((scale * q).unsqueeze(-2) @ new).squeeze(-2), new
