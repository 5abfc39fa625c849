"""Attention residuals: a learned softmax mix over banked rows of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype


def attn_res_mix(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """Mix m rows per token.

        s_j = <query, R_j> / sqrt(mean(R_j^2) + eps)
        p   = softmax_j(s)
        out = sum_j p_j R_j

    Keys are the normed rows, values the raw ones. The rows are never stacked, so that no copy of
    the bank is made.

    Args:
        rows: m tensors [T, D].
        query: [D], norm gain times projection, a learned constant.
        eps: of the RMS norm of the keys.

    Returns:
        [T, D] in the dtype of the rows.
    """
    dtype = island_dtype(rows[0])
    wide = [row.to(dtype) for row in rows]
    q = query.to(dtype)
    scores = [(r @ q) * torch.rsqrt(r.square().mean(-1) + eps) for r in wide]
    weights = torch.softmax(torch.stack(scores), 0)
    out = weights[0].unsqueeze(-1) * wide[0]
    for weight, row in zip(weights[1:], wide[1:], strict=True):
        out = torch.addcmul(out, weight.unsqueeze(-1), row)
    return out.to(rows[0].dtype)
