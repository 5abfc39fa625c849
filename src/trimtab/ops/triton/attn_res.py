"""The mix of attention residuals, one program per token and each row read in place.

Rows are separate tensors: kernels get their addresses in an int64 tensor, so that no bank is ever
stacked. The equations of the backward pass are those of `fused/attn_res.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.custom import custom_op


@triton.jit
def _row(addresses, j, t, D, at, like):
    """The t-th row of the j-th tensor in float32, and where it lies."""
    pointer = tl.load(addresses + j).to(tl.pointer_type(like.dtype.element_ty))
    where = pointer + t.to(tl.int64) * D + at
    return where, tl.load(where, mask=at < D, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    addresses, query, out, stats, m, T, D, eps, BLOCK: tl.constexpr
):
    t = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < D
    q = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    top, total = -float("inf"), 0.0
    mixed = tl.zeros((BLOCK,), tl.float32)
    for j in range(m):
        _, row = _row(addresses, j, t, D, at, out)
        norm = 1.0 / tl.sqrt(tl.sum(row * row) / D + eps)
        score = tl.sum(row * q) * norm
        new = tl.maximum(top, score)
        shrink, share = tl.exp(top - new), tl.exp(score - new)
        mixed = mixed * shrink + share * row
        total = total * shrink + share
        top = new
        tl.store(stats + j * T + t, score)
        tl.store(stats + (m + j) * T + t, norm)
    where = out + t.to(tl.int64) * D + at
    tl.store(where, (mixed / total).to(out.dtype.element_ty), mask=inside)
    tl.store(stats + 2 * m * T + t, top + tl.log(total))


@triton.jit
def _backward_kernel(
    addresses, d_addresses, query, grad, stats, along, m, T, D, BLOCK: tl.constexpr
):
    t = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < D
    q = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + t.to(tl.int64) * D + at, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(stats + 2 * m * T + t)
    mean = 0.0
    for j in range(m):
        _, row = _row(addresses, j, t, D, at, grad)
        mean += tl.exp(tl.load(stats + j * T + t) - lse) * tl.sum(g * row)
    for j in range(m):
        _, row = _row(addresses, j, t, D, at, grad)
        score = tl.load(stats + j * T + t)
        norm = tl.load(stats + (m + j) * T + t)
        weight = tl.exp(score - lse)
        along_q = weight * (tl.sum(g * row) - mean) * norm
        change = weight * g + along_q * q - along_q * score * norm / D * row
        target, _ = _row(d_addresses, j, t, D, at, grad)
        tl.store(target, change.to(grad.dtype.element_ty), mask=inside)
        tl.store(along + j * T + t, along_q)


def attn_res_mix_triton(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """Arguments and result as `attn_res_mix`."""
    out: Tensor
    out, _ = attn_res_triton_fwd([row.contiguous() for row in rows], query, eps)
    return out


@custom_op("trimtab::attn_res_triton_fwd")
def attn_res_triton_fwd(rows: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mix [T, D], and [2m+1, T] in float32: scores, 1/rms and the logsumexp of the scores."""
    tokens, width = rows[0].shape
    out = torch.empty_like(rows[0])
    stats = _stats(rows, query)
    if tokens:
        _forward_kernel[(tokens,)](
            _addresses(rows), query.contiguous(), out, stats, len(rows), tokens, width, eps,
            triton.next_power_of_2(width),
        )
    return out, stats


@custom_op("trimtab::attn_res_triton_bwd")
def attn_res_triton_bwd(
    grad: Tensor, rows: Sequence[Tensor], query: Tensor, stats: Tensor, need_query: bool
) -> tuple[list[Tensor], Tensor]:
    """Gradients of all rows and of the query."""
    tokens, width = rows[0].shape
    grad = grad.contiguous()
    d_rows = [torch.empty_like(row) for row in rows]
    along = stats.new_empty(len(rows), tokens)
    if tokens:
        _backward_kernel[(tokens,)](
            _addresses(rows), _addresses(d_rows), query.contiguous(), grad, stats, along, len(rows),
            tokens, width, triton.next_power_of_2(width),
        )
    d_query = stats.new_zeros(width)
    for row, factor in zip(rows, along, strict=True) if need_query else ():
        d_query.addmv_(row.to(stats.dtype).mT, factor)
    return d_rows, d_query.to(query.dtype)


def _stats(rows: Sequence[Tensor], query: Tensor) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(2 * len(rows) + 1, rows[0].shape[0], dtype=dtype)


def _addresses(rows: Sequence[Tensor]) -> Tensor:
    return torch.tensor([row.data_ptr() for row in rows], device=rows[0].device)


@attn_res_triton_fwd.register_fake
def _(rows: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rows[0].new_empty(rows[0].shape), _stats(rows, query)


@attn_res_triton_bwd.register_fake
def _(
    grad: Tensor, rows: Sequence[Tensor], query: Tensor, stats: Tensor, need_query: bool
) -> tuple[list[Tensor], Tensor]:
    return [row.new_empty(row.shape) for row in rows], query.new_empty(query.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, query, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, output[1], *rows)


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[list[Tensor], Tensor | None, None]:
    query, stats, *rows = ctx.saved_tensors
    need_query = ctx.needs_input_grad[1]
    d_rows, d_query = attn_res_triton_bwd(grad, rows, query, stats, need_query)
    return d_rows, d_query if need_query else None, None


attn_res_triton_fwd.register_autograd(_backward, setup_context=_setup)
