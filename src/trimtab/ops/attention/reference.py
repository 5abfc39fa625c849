"""Causal attention as it is defined, one query at a time.

    p = softmax_s( scale q_t . k_s )  over the visible s of the same sequence (selected ones only)
    o_t = sum_s p_s v_s
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor,
    selected: Tensor | None = None,
) -> Tensor:
    """Attention over a pack.

    Args:
        q: [T, H, K].
        k: [T, H, K].
        v: [T, H, V].
        scale: factor on the scores.
        cu_seqlens: [N+1] int.
        selected: [T, S] int, positions in the pack of the keys each query may use, -1 for none;
            None for all.

    Returns:
        [T, H, V] in the dtype of v.
    """
    dtype = island_dtype(q)
    borders = cu_seqlens.tolist()
    rows = []
    for begin, end in pairwise(borders):
        for t in range(begin, end):
            keys = torch.arange(begin, t + 1, device=q.device)
            if selected is not None:
                keys = keys[torch.isin(keys, selected[t].to(keys.dtype))]
            scores = torch.einsum("hk,shk->hs", q[t].to(dtype), k[keys].to(dtype)) * scale
            p = torch.softmax(scores, -1)
            rows.append(torch.einsum("hs,shv->hv", p, v[keys].to(dtype)).to(v.dtype))
    return torch.stack(rows) if rows else torch.zeros_like(v)
