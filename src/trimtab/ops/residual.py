"""Attention residuals: a learned softmax mix over banked rows of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.ops.checks import check_shape, require
from trimtab.ops.fused.attn_res import fused_attn_res_mix, workspace_bytes
from trimtab.ops.precision import island_dtype
from trimtab.ops.registry import Implementation, OpCase, Operator
from trimtab.ops.triton import support as triton


def attn_res_mix(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """Reference: mix m rows per token.

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


def _triton(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    from trimtab.ops.triton.attn_res import attn_res_mix_triton

    return attn_res_mix_triton(rows, query, eps)


def attn_res_case(rows: Sequence[Tensor], query: Tensor, eps: float) -> OpCase:
    """The case of a call, after its arguments were checked.

    Raises:
        OperatorError: TT111, a shape or dtype is wrong.
    """
    del eps
    require(len(rows) > 0, "attn_res.rows", "must hold at least one tensor", len(rows))
    check_shape("attn_res.rows[0]", rows[0], "T D")
    tokens, width = rows[0].shape
    for j, row in enumerate(rows[1:], 1):
        check_shape(f"attn_res.rows[{j}]", row, "T D", {"T": tokens, "D": width})
        same = row.dtype is rows[0].dtype
        require(same, f"attn_res.rows[{j}]", f"must be {rows[0].dtype} as rows[0] is", row.dtype)
    check_shape("attn_res.query", query, "D", {"D": width})
    shapes = {"T": tokens, "D": width, "m": len(rows)}
    return OpCase(rows[0].device.type, rows[0].dtype, shapes)


ATTN_RES: Operator[[Sequence[Tensor], Tensor, float], Tensor] = Operator(
    "attn_res", attn_res_case,
    (
        Implementation("triton", _triton, triton.supports),
        Implementation(
            "one_pass", fused_attn_res_mix, workspace_bytes=lambda case: workspace_bytes(case.shapes)
        ),
        Implementation("reference", attn_res_mix),
    ),
    {"T": 4096, "D": 7168, "m": 9},
)
