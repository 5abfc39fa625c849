"""Causal attention in blocks of queries, with memory linear in the number of tokens.

Forward keeps the output and the log-sum-exp of each row; backward computes the probabilities of a
block again. A block of queries reads keys from the start of its first query's sequence, so packs
of short sequences cost what the sequences cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype

QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class PackBorders:
    """Sequence starts of a pack: per token on the device, per query block on the host.

    Args:
        starts: [T] int64, position of the first token of each token's sequence.
        block_starts: key position from which each block of `QUERY_BLOCK` queries reads.
    """

    starts: Tensor
    block_starts: tuple[int, ...]


def pack_borders(lengths: tuple[int, ...], device: torch.device) -> PackBorders:
    """Borders of a pack of sequences of the given lengths."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    return PackBorders(starts.to(device), tuple(starts[::QUERY_BLOCK].tolist()))


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, borders: PackBorders,
    selected: Tensor | None = None,
) -> Tensor:
    """Attention over a pack; shapes as in `attention_reference`, borders in place of cu_seqlens."""
    out: Tensor = _Blockwise.apply(q, k, v, scale, borders, selected)  # type: ignore[no-untyped-call]  # torch's
    return out


def visible_mask(borders: PackBorders, queries: slice, keys: slice) -> Tensor:
    """[queries, keys] bool: key in the same sequence and not after the query."""
    device = borders.starts.device
    key = torch.arange(keys.start, keys.stop, device=device)
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return (key <= query) & (key >= borders.starts[queries].unsqueeze(1))


def blocks(borders: PackBorders) -> Iterator[tuple[slice, slice]]:
    """Query blocks with the keys they can see."""
    total = borders.starts.shape[0]
    for n, key_start in enumerate(borders.block_starts):
        begin = n * QUERY_BLOCK
        end = min(begin + QUERY_BLOCK, total)
        yield slice(begin, end), slice(key_start, end)


def _block_scores(
    q: Tensor, k: Tensor, scale: float, borders: PackBorders, selected: Tensor | None,
    queries: slice, keys: slice,
) -> Tensor:
    """[H, queries, keys] with -inf at what a query may not see."""
    scores = (q[:, queries] * scale) @ k[:, keys].mT
    mask = visible_mask(borders, queries, keys)
    if selected is not None:
        mask &= _selection_mask(selected[queries], keys)
    return scores.masked_fill_(~mask, float("-inf"))


def _selection_mask(selected: Tensor, keys: slice) -> Tensor:
    width = keys.stop - keys.start
    column = selected.long() - keys.start
    column = torch.where(selected < 0, width, column)  # the extra last column takes the empty slots
    mask = torch.zeros(selected.shape[0], width + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, column, True)[:, :width]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, borders: PackBorders,
        selected: Tensor | None,
    ) -> Tensor:
        dtype = island_dtype(q)
        qh, kh, vh = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
        out = torch.empty(v.shape[0], v.shape[1], v.shape[2], dtype=dtype, device=v.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
        for queries, keys in blocks(borders):
            scores = _block_scores(qh, kh, scale, borders, selected, queries, keys)
            # A query that may see nothing has no sum; with 0 its probabilities are 0.
            sums = torch.logsumexp(scores, -1)
            lse[:, queries] = sums.masked_fill(sums == float("-inf"), 0.0)
            p = torch.exp(scores - lse[:, queries].unsqueeze(-1))
            out[queries] = (p @ vh[:, keys]).transpose(0, 1)
        ctx.scale, ctx.borders, ctx.selected = scale, borders, selected
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dtype = out.dtype
        qh, kh, vh = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
        go = grads[0].to(dtype).transpose(0, 1)
        delta = (go * out.transpose(0, 1)).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(qh), torch.zeros_like(kh), torch.zeros_like(vh)
        for queries, keys in blocks(ctx.borders):
            scores = _block_scores(qh, kh, ctx.scale, ctx.borders, ctx.selected, queries, keys)
            p = torch.exp(scores - lse[:, queries].unsqueeze(-1))
            dv[:, keys] += p.mT @ go[:, queries]
            ds = p * (go[:, queries] @ vh[:, keys].mT - delta[:, queries])
            dq[:, queries] = (ds @ kh[:, keys]) * ctx.scale
            dk[:, keys] += (ds.mT @ qh[:, queries]) * ctx.scale
        dq, dk, dv = (x.transpose(0, 1) for x in (dq, dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
