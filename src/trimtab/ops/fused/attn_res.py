"""The mix of attention residuals, reading every banked row once.

In blocks of tokens: the scores of all m rows, their softmax, the weighted sum, while the block is in
the cache. Kept are three numbers per row and token. With p the weights, n_j = 1 / rms of row j and
s_j the score, the backward pass is

    dp_j = <g, R_j>;  ds_j = p_j (dp_j - sum_k p_k dp_k)
    dR_j = p_j g + ds_j (n_j query - s_j n_j^2 / D  R_j);  dquery = sum_j sum_t ds_j n_j R_j
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.custom import custom_op
from trimtab.ops.precision import island_dtype

_BLOCK_ELEMENTS = 1 << 17  # of one row tensor at a time


def fused_attn_res_mix(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """`attn_res_mix` that keeps the rows and [3, m, T] statistics; arguments as there."""
    out: Tensor
    out, _ = attn_res_fwd(list(rows), query, eps)
    return out


def workspace_bytes(shapes: Mapping[str, int]) -> int:
    """Bytes beside inputs and output of the forward pass.

    Args:
        shapes: T, D and m, the number of rows.
    """
    t, d, m = shapes["T"], shapes["D"], shapes["m"]
    return 4 * (3 * m * t + (m + 2) * min(t, _step(d)) * d)


@custom_op("trimtab::attn_res_fwd")
def attn_res_fwd(rows: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mix [T, D], and weights, scores and 1/rms [3, m, T] in at least float32."""
    dtype = island_dtype(rows[0])
    tokens, width = rows[0].shape
    q = query.to(dtype)
    out = torch.empty(rows[0].shape, dtype=rows[0].dtype, device=rows[0].device)
    stats = rows[0].new_empty(3, len(rows), tokens, dtype=dtype)
    for start in range(0, tokens, _step(width)):
        part = slice(start, start + _step(width))
        weights, scores, norms = (kind[:, part] for kind in stats.unbind())
        wide = [row[part].to(dtype) for row in rows]
        for j, row in enumerate(wide):
            square = torch.linalg.vector_norm(row, dim=1).square_().div_(width)
            norms[j] = square.add_(eps).rsqrt_()
            scores[j] = torch.mv(row, q).mul_(norms[j])
        weights.copy_(torch.softmax(scores, 0))
        mixed = wide[0] * weights[0].unsqueeze(1)
        for weight, row in zip(weights[1:], wide[1:], strict=True):
            mixed.addcmul_(weight.unsqueeze(1), row)
        out[part] = mixed
    return out, stats


@custom_op("trimtab::attn_res_bwd")
def attn_res_bwd(
    grad: Tensor, rows: Sequence[Tensor], query: Tensor, stats: Tensor, needed: Sequence[bool],
    need_query: bool,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the rows needed (the others are empty) and of the query."""
    dtype = stats.dtype
    tokens, width = rows[0].shape
    q = query.to(dtype)
    d_rows = [
        torch.empty(row.shape, dtype=row.dtype, device=row.device) if need else row.new_empty(0)
        for row, need in zip(rows, needed, strict=True)
    ]
    d_query = torch.zeros_like(q)
    for start in range(0, tokens, _step(width)):
        part = slice(start, start + _step(width))
        weights, scores, norms = (kind[:, part] for kind in stats.unbind())
        g = grad[part].to(dtype)
        wide = [row[part].to(dtype) for row in rows]
        d_weights = torch.stack([torch.linalg.vecdot(g, row) for row in wide])
        mean = (weights * d_weights).sum(0)
        d_scores = weights * (d_weights - mean)
        along_q = d_scores * norms
        along_row = scores * norms * along_q / -width
        for j, row in enumerate(wide):
            if needed[j]:
                change = (g * weights[j].unsqueeze(1)).addr_(along_q[j], q)
                d_rows[j][part] = change.addcmul_(along_row[j].unsqueeze(1), row)
            if need_query:
                d_query.addmv_(row.mT, along_q[j])
    return d_rows, d_query.to(query.dtype)


def _step(width: int) -> int:
    return max(1, _BLOCK_ELEMENTS // width)


@attn_res_fwd.register_fake
def _fake_fwd(rows: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del query, eps
    first = rows[0]
    stats = first.new_empty(3, len(rows), first.shape[0], dtype=island_dtype(first))
    return first.new_empty(first.shape), stats


@attn_res_bwd.register_fake
def _fake_bwd(
    grad: Tensor, rows: Sequence[Tensor], query: Tensor, stats: Tensor, needed: Sequence[bool],
    need_query: bool,
) -> tuple[list[Tensor], Tensor]:
    del grad, stats, need_query
    d_rows = [row.new_empty(row.shape if n else 0) for row, n in zip(rows, needed, strict=True)]
    return d_rows, query.new_empty(query.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, query, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, output[1], *rows)


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[list[Tensor | None], Tensor | None, None]:
    query, stats, *rows = ctx.saved_tensors
    needed, need_query, _unused = ctx.needs_input_grad
    d_rows, d_query = attn_res_bwd(grad, rows, query, stats, list(needed), need_query)
    kept = [d if need else None for d, need in zip(d_rows, needed, strict=True)]
    return kept, d_query if need_query else None, None


attn_res_fwd.register_autograd(_backward, setup_context=_setup)
