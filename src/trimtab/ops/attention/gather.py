"""Sparse latent attention over gathered latents, with kv_b absorbed into query and output.

    u_t = [W_k q_n ; q_p]                         per head, as wide as a latent with its shared part
    s = scale u_t . c_s,   p = softmax(s),   m_t = sum_s p c_s
    o_t = W_v m_t

The selected c_s = [latent ; shared part] of a query are fetched once for all its heads, and the
cost of a query no longer depends on how many keys it sees. Keys and values per head never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.attention.packs import blocks, pack_borders
from trimtab.ops.attention.selection import Selection
from trimtab.ops.custom import custom_op
from trimtab.ops.precision import island_dtype

# Elements of a buffer of gathered latents: 4 MiB in float32, which stays in cache between its uses.
BUFFER_ELEMENTS = 1 << 20


def gathered_attention(
    q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, scale: float, selection: Selection
) -> Tensor:
    """Attention of every query to its selected keys.

    Args:
        q: [T, H, K + P], the P rotated (or shared) channels last.
        latent: [T, L].
        shared: [T, P], key part that all heads share.
        weight: [H, K + V, L], maps a latent to keys and values.
        scale: factor on the scores.
        selection: keys of each query.

    Returns:
        [T, H, V] in the dtype of latent.
    """
    lengths = list(selection.borders.lengths)
    out, _ = torch.ops.trimtab.attention_gather_fwd(
        q, latent, shared, weight, lengths, selection.stored, selection.width, scale
    )
    found: Tensor = out.to(latent.dtype)
    return found


class _Gather:
    """What forward and backward share: wide tensors, the buffer, blocks of queries."""

    def __init__(
        self, q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, lengths: Sequence[int],
        stored: Tensor, width: int, scale: float,
    ) -> None:
        dtype = island_dtype(q)
        self.nope, self.rank = q.shape[2] - shared.shape[1], latent.shape[1]
        self.q, self.scale = q.to(dtype), scale
        self.rows = torch.cat((latent, shared), 1).to(dtype)  # [T, L + P]
        wide = weight.to(dtype)
        self.up_key, self.up_value = wide[:, : self.nope], wide[:, self.nope :]
        self.selection = Selection.of(pack_borders(tuple(lengths), q.device), width, stored)
        step = max(1, BUFFER_ELEMENTS // max(1, width * self.rows.shape[1]))
        self._fetched = self.q.new_empty(step * width * self.rows.shape[1])
        self._step = step

    def absorbed(self, queries: slice) -> Tensor:
        """[q, H, L + P]."""
        q = self.q[queries] * self.scale
        wide = torch.bmm(q[..., : self.nope].transpose(0, 1), self.up_key)
        return torch.cat((wide.transpose(0, 1), q[..., self.nope :]), -1)

    def pieces(self, queries: slice, keys: slice) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Few queries at a time: rows of the block, keys [n, S], empty slots [n, S], [n, S, L + P]."""
        positions = self.selection.block_positions(queries, keys)
        used = max(1, int((positions >= 0).sum(1).max()))
        positions = positions[:, :used]
        empty = positions < 0
        index = positions.clamp(min=0).long()
        for first in range(0, len(index), self._step):
            piece = slice(first, min(first + self._step, len(index)))
            shape = (piece.stop - first, used, self.rows.shape[1])
            fetched = self._fetched[: shape[0] * shape[1] * shape[2]].view(shape)
            torch.index_select(self.rows, 0, index[piece].flatten(), out=fetched.flatten(0, 1))
            yield piece, index[piece], empty[piece].unsqueeze(1), fetched


@custom_op("trimtab::attention_gather_fwd")
def _forward(
    q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, lengths: Sequence[int],
    stored: Tensor, width: int, scale: float,
) -> tuple[Tensor, Tensor]:
    op = _Gather(q, latent, shared, weight, lengths, stored, width, scale)
    out, lse = _outputs(q, shared, weight)
    for queries, keys in blocks(op.selection.borders):
        absorbed = op.absorbed(queries)
        mixed = absorbed.new_empty(*absorbed.shape[:2], op.rank)
        for piece, _, empty, fetched in op.pieces(queries, keys):
            scores = torch.bmm(absorbed[piece], fetched.mT).masked_fill_(empty, float("-inf"))
            sums = torch.logsumexp(scores, -1)
            sums.masked_fill_(sums == float("-inf"), 0.0)  # a query that may use nothing takes nothing
            p = scores.sub_(sums.unsqueeze(-1)).exp_()
            torch.bmm(p, fetched[..., : op.rank], out=mixed[piece])
            lse[queries][piece] = sums
        value = torch.bmm(mixed.transpose(0, 1), op.up_value.mT)
        out[queries] = value.transpose(0, 1)
    return out, lse


def _outputs(q: Tensor, shared: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total, heads, wide = q.shape
    value = weight.shape[1] - (wide - shared.shape[1])
    dtype = island_dtype(q)
    return q.new_empty(total, heads, value, dtype=dtype), q.new_empty(total, heads, dtype=dtype)


@_forward.register_fake
def _(
    q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, lengths: Sequence[int],
    stored: Tensor, width: int, scale: float,
) -> tuple[Tensor, Tensor]:
    return _outputs(q, shared, weight)


@custom_op("trimtab::attention_gather_bwd")
def _backward(
    grad: Tensor, q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, out: Tensor,
    lse: Tensor, lengths: Sequence[int], stored: Tensor, width: int, scale: float,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    op = _Gather(q, latent, shared, weight, lengths, stored, width, scale)
    rank, nope = op.rank, op.nope
    grad = grad.to(op.q.dtype)
    delta = (grad * out).sum(-1)  # [T, H]
    dq, drows = torch.empty_like(op.q), torch.zeros_like(op.rows)
    dweight = op.q.new_zeros(weight.shape if need_weight else 0)
    for queries, keys in blocks(op.selection.borders):
        absorbed = op.absorbed(queries)
        go = grad[queries].transpose(0, 1)  # [H, q, V]
        dmixed = torch.bmm(go, op.up_value).transpose(0, 1)  # [q, H, L]
        dwide, mixed = torch.empty_like(absorbed), torch.empty_like(dmixed)
        for piece, index, empty, fetched in op.pieces(queries, keys):
            scores = torch.bmm(absorbed[piece], fetched.mT).masked_fill_(empty, float("-inf"))
            p = scores.sub_(lse[queries][piece].unsqueeze(-1)).exp_()
            ds = torch.bmm(dmixed[piece], fetched[..., :rank].mT)
            ds.sub_(delta[queries][piece].unsqueeze(-1)).mul_(p)
            dwide[piece] = torch.bmm(ds, fetched)
            if need_weight:
                mixed[piece] = torch.bmm(p, fetched[..., :rank])
            # The gradient of the fetched rows takes their place in the buffer.
            torch.bmm(ds.mT, absorbed[piece], out=fetched)
            fetched[..., :rank].baddbmm_(p.mT, dmixed[piece])
            drows.index_add_(0, index.flatten(), fetched.flatten(0, 1))
        dlatent_q = dwide[..., :rank].transpose(0, 1)  # [H, q, L]
        dq[queries, :, :nope] = torch.bmm(dlatent_q, op.up_key.mT).transpose(0, 1)
        dq[queries, :, nope:] = dwide[..., rank:]
        if need_weight:
            scaled = (op.q[queries, :, :nope] * scale).transpose(0, 1)
            dweight[:, :nope].baddbmm_(scaled.mT, dlatent_q)
            dweight[:, nope:].baddbmm_(go.mT, mixed.transpose(0, 1))
    return dq.mul_(scale).to(q.dtype), drows.to(latent.dtype), dweight.to(weight.dtype)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, out: Tensor,
    lse: Tensor, lengths: Sequence[int], stored: Tensor, width: int, scale: float,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    drows = latent.new_empty(latent.shape[0], latent.shape[1] + shared.shape[1])
    return torch.empty_like(q), drows, torch.empty_like(weight) if need_weight else weight.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, latent, shared, weight, lengths, stored, width, scale = inputs
    ctx.lengths, ctx.width, ctx.scale = lengths, width, scale
    ctx.save_for_backward(q, latent, shared, weight, stored, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, latent, shared, weight, stored, out, lse = ctx.saved_tensors
    need_weight = ctx.needs_input_grad[3]
    dq, drows, dweight = torch.ops.trimtab.attention_gather_bwd(
        grad, q, latent, shared, weight, out, lse, ctx.lengths, stored, ctx.width, ctx.scale,
        need_weight,
    )
    dlatent, dshared = drows.split((latent.shape[1], shared.shape[1]), 1)
    return dq, dlatent, dshared.to(shared.dtype), dweight if need_weight else None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _multiplies(q: Sequence[int], latent: Sequence[int], width: int, shared: Sequence[int]) -> tuple[int, int]:
    """Multiplications of one product of all queries with their keys' rows, and with their latents."""
    slots = q[0] * q[1] * width
    return slots * (latent[1] + shared[1]), slots * latent[1]


@register_flop_formula(torch.ops.trimtab.attention_gather_fwd)
def _forward_flops(
    q: Sequence[int], latent: Sequence[int], shared: Sequence[int], weight: Sequence[int],
    lengths: Sequence[int], stored: object, width: int, *_: object, **__: object,
) -> int:
    rows, latents = _multiplies(q, latent, width, shared)
    return 2 * (rows + latents + q[0] * weight[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.trimtab.attention_gather_bwd)
def _backward_flops(
    grad: Sequence[int], q: Sequence[int], latent: Sequence[int], shared: Sequence[int],
    weight: Sequence[int], out: object, lse: object, lengths: Sequence[int], stored: object,
    width: int, scale: float, need_weight: bool, *_: object, **__: object,
) -> int:
    rows, latents = _multiplies(q, latent, width, shared)
    absorb = q[0] * weight[0] * weight[1] * weight[2]
    # u once more, scores once more, their gradient, that of u, that of the rows; then the weights.
    fixed = 3 * rows + 2 * latents + 3 * absorb
    return 2 * (fixed + (latents + absorb if need_weight else 0))
