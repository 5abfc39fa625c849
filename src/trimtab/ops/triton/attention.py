"""Sparse latent attention on CUDA devices: fetch, score, softmax and sum of the selected latents.

One program per query and 16 heads. The positions of a query are read block by block; each block of
latents is fetched once for all those heads and serves as keys and as values. The map from latent to
keys and values is absorbed into query and output, as in `attention/gather.py`; it stays plain
PyTorch around the kernels. Gradients of latents are added atomically, so their last bits may vary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.custom import custom_op
from trimtab.ops.triton.common import product

if TYPE_CHECKING:
    from trimtab.ops.attention.selection import Selection

_HEADS = 16
_KEYS = 16


def attention_triton(
    q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, scale: float, selection: Selection
) -> Tensor:
    """Attention of every query to its selected keys; arguments and result as `gathered_attention`."""
    nope = q.shape[2] - shared.shape[1]
    up_key, up_value = weight.to(q.dtype).split((nope, weight.shape[1] - nope), 1)
    wide = torch.bmm(q[..., :nope].transpose(0, 1), up_key).transpose(0, 1)  # [T, H, L]
    positions = selection.all_positions()
    mixed: Tensor
    mixed, _ = attention_triton_fwd(
        wide * scale, q[..., nope:] * scale, latent, shared, positions
    )
    return torch.bmm(mixed.transpose(0, 1), up_value.mT).transpose(0, 1)


@triton.jit
def _keys(latent, shared, positions, t, s, used, S, L, P, BS: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr):
    """One block of a query's keys: latents, shared parts, positions, and which exist."""
    slot = s + tl.arange(0, BS)
    real = slot < used
    at = tl.load(positions + t * S + slot, mask=real, other=0).to(tl.int64)
    i, j = tl.arange(0, BL)[None, :], tl.arange(0, BP)[None, :]
    c = tl.load(latent + at[:, None] * L + i, mask=real[:, None] & (i < L), other=0.0)
    p = tl.load(shared + at[:, None] * P + j, mask=real[:, None] & (j < P), other=0.0)
    return c.to(tl.float32), p.to(tl.float32), at, real


@triton.jit
def _heads(x, t, first, H, N, BH: tl.constexpr, BN: tl.constexpr):
    """Addresses of [BH, BN] in x [T, H, N], and which of them exist."""
    head, at = first + tl.arange(0, BH)[:, None], tl.arange(0, BN)[None, :]
    return x + (t * H + head) * N + at, (head < H) & (at < N)


@triton.jit
def _load(x, t, first, H, N, BH: tl.constexpr, BN: tl.constexpr):
    where, exists = _heads(x, t, first, H, N, BH, BN)
    return tl.load(where, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    u, up, latent, shared, positions, used, mixed, lse, S, H, L, P, NARROW: tl.constexpr,
    BH: tl.constexpr, BS: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr,
):
    t, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH
    q, r = _load(u, t, first, H, L, BH, BL), _load(up, t, first, H, P, BH, BP)
    top = tl.full((BH,), -float("inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BL), tl.float32)
    count = tl.load(used + t)
    for s in range(0, count, BS):
        c, p, _at, real = _keys(latent, shared, positions, t, s, count, S, L, P, BS, BL, BP)
        score = product(q, tl.trans(c), NARROW) + product(r, tl.trans(p), NARROW)
        score = tl.where(real[None, :], score, -float("inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink, share = tl.exp(top - new), tl.exp(score - new[:, None])
        acc = acc * shrink[:, None] + product(share, c, NARROW)
        total = total * shrink + tl.sum(share, 1)
        top = new
    # A query that may use nothing takes nothing.
    none = total == 0.0
    safe = tl.where(none, 1.0, total)
    where, exists = _heads(mixed, t, first, H, L, BH, BL)
    tl.store(where, (acc / safe[:, None]).to(mixed.dtype.element_ty), mask=exists)
    head = first + tl.arange(0, BH)
    tl.store(lse + t * H + head, tl.where(none, 0.0, top + tl.log(safe)), mask=head < H)


@triton.jit
def _backward_kernel(
    grad, delta, u, up, latent, shared, positions, used, lse, du, d_up, d_latent, d_shared,
    S, H, L, P, NARROW: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, BL: tl.constexpr,
    BP: tl.constexpr,
):
    t, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH
    q, r = _load(u, t, first, H, L, BH, BL), _load(up, t, first, H, P, BH, BP)
    g = _load(grad, t, first, H, L, BH, BL)
    head = first + tl.arange(0, BH)
    norm = tl.load(lse + t * H + head, mask=head < H, other=0.0)
    inner = tl.load(delta + t * H + head, mask=head < H, other=0.0)
    dq, dr = tl.zeros((BH, BL), tl.float32), tl.zeros((BH, BP), tl.float32)
    i, j = tl.arange(0, BL)[None, :], tl.arange(0, BP)[None, :]
    count = tl.load(used + t)
    for s in range(0, count, BS):
        c, p, at, real = _keys(latent, shared, positions, t, s, count, S, L, P, BS, BL, BP)
        score = product(q, tl.trans(c), NARROW) + product(r, tl.trans(p), NARROW)
        share = tl.where(real[None, :] & (head < H)[:, None], tl.exp(score - norm[:, None]), 0.0)
        ds = share * (product(g, tl.trans(c), NARROW) - inner[:, None])
        dq += product(ds, c, NARROW)
        dr += product(ds, p, NARROW)
        back = tl.trans(ds)
        dc = product(back, q, NARROW) + product(tl.trans(share), g, NARROW)
        tl.atomic_add(d_latent + at[:, None] * L + i, dc, mask=real[:, None] & (i < L))
        dp = product(back, r, NARROW)
        tl.atomic_add(d_shared + at[:, None] * P + j, dp, mask=real[:, None] & (j < P))
    where, exists = _heads(du, t, first, H, L, BH, BL)
    tl.store(where, dq.to(du.dtype.element_ty), mask=exists)
    where, exists = _heads(d_up, t, first, H, P, BH, BP)
    tl.store(where, dr.to(d_up.dtype.element_ty), mask=exists)


@custom_op("trimtab::attention_triton_fwd")
def attention_triton_fwd(
    u: Tensor, up: Tensor, latent: Tensor, shared: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sums of latents [T, H, L] and logsumexp [T, H], from absorbed, scaled queries.

    Args:
        u: [T, H, L].
        up: [T, H, P], the part that meets `shared`.
        latent: [T, L].
        shared: [T, P].
        positions: [T, S] int32, negative in unused slots at the end.
    """
    u, up, latent, shared = (x.contiguous() for x in (u, up, latent, shared))
    tokens, heads, _ = u.shape
    mixed = torch.empty_like(u)
    lse = u.new_empty(tokens, heads, dtype=torch.promote_types(u.dtype, torch.float32))
    if tokens * heads:
        _forward_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            u, up, latent, shared, positions.contiguous(), _used(positions), mixed, lse,
            *_constants(u, up, positions),
        )
    return mixed, lse


@custom_op("trimtab::attention_triton_bwd")
def attention_triton_bwd(
    grad: Tensor, u: Tensor, up: Tensor, latent: Tensor, shared: Tensor, positions: Tensor,
    mixed: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, up, latent and shared."""
    grad, u, up, latent, shared = (x.contiguous() for x in (grad, u, up, latent, shared))
    tokens, heads, _ = u.shape
    delta = (grad.to(lse.dtype) * mixed.to(lse.dtype)).sum(-1)
    du, d_up = torch.empty_like(u), torch.empty_like(up)
    d_latent, d_shared = (torch.zeros_like(x, dtype=lse.dtype) for x in (latent, shared))
    if tokens * heads:
        _backward_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            grad, delta, u, up, latent, shared, positions.contiguous(), _used(positions), lse, du,
            d_up, d_latent, d_shared, *_constants(u, up, positions),
        )
    return du, d_up, d_latent.to(latent.dtype), d_shared.to(shared.dtype)


def _used(positions: Tensor) -> Tensor:
    return (positions >= 0).sum(1, dtype=torch.int32)


def _constants(u: Tensor, up: Tensor, positions: Tensor) -> tuple[int | bool, ...]:
    heads, rank, extra = u.shape[1], u.shape[2], up.shape[2]
    narrow = u.dtype is torch.bfloat16 and u.device.type == "cuda"
    wide = (max(16, triton.next_power_of_2(size)) for size in (rank, extra))
    return positions.shape[1], heads, rank, extra, narrow, _HEADS, _KEYS, *wide


@attention_triton_fwd.register_fake
def _(
    u: Tensor, up: Tensor, latent: Tensor, shared: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(u.dtype, torch.float32)
    return u.new_empty(u.shape), u.new_empty(u.shape[:2], dtype=dtype)


@attention_triton_bwd.register_fake
def _(
    grad: Tensor, u: Tensor, up: Tensor, latent: Tensor, shared: Tensor, positions: Tensor,
    mixed: Tensor, lse: Tensor,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (u, up, latent, shared))


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return (*attention_triton_bwd(grad, *ctx.saved_tensors), None)


attention_triton_fwd.register_autograd(_backward, setup_context=_setup)
