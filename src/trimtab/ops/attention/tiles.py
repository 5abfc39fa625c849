"""Causal latent attention in tiles of queries and keys, with memory linear in T.

    s = scale (q_n . k_n + q_p . k_p)      k_n, v per head from the latent; k_p shared by all heads
    p = softmax over the visible, or selected, keys;   o = p v

A tile is a block of queries against all keys that one of them may use; key ranges of which the
block selects nothing are left out. Forward keeps the output and the log-sum-exp of each row,
backward computes the probabilities again. The shared key part is never repeated per head. Two
buffers of a few MiB serve all tiles of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.attention.packs import QUERY_BLOCK, PackBorders, blocks, pack_borders
from trimtab.ops.attention.selection import Selection
from trimtab.ops.attention.tile_mask import KeyRuns, TileMask, block_mask
from trimtab.ops.custom import custom_op
from trimtab.ops.precision import island_dtype

# Elements of a score buffer: heads are taken together while they fit, so that short packs are not
# all overhead, and one head alone takes what one block of queries needs.
BUFFER_ELEMENTS = 1 << 20


def tiled_attention(
    q: Tensor, kv: Tensor, shared: Tensor, scale: float, borders: PackBorders,
    selection: Selection | None = None, *, native: bool = False,
) -> Tensor:
    """Attention over a pack.

    Args:
        q: [T, H, K + P], the P rotated (or shared) channels last.
        kv: [T, H, K + V], keys without the shared part, then values.
        shared: [T, P], key part that all heads share.
        scale: factor on the scores.
        borders: of the pack.
        selection: keys each query may use; None for all it sees.
        native: whether the compiled kernels do the passes over the scores.

    Returns:
        [T, H, V] in the dtype of kv.
    """
    stored, width = (None, 0) if selection is None else (selection.stored, selection.width)
    out, _ = torch.ops.trimtab.attention_tiles_fwd(
        q, kv, shared, list(borders.lengths), stored, width, scale, native
    )
    found: Tensor = out.to(kv.dtype)
    return found


class _Tiles:
    """What forward and backward share: tensors in the compute dtype, buffers, masks of blocks."""

    def __init__(
        self, q: Tensor, kv: Tensor, shared: Tensor, lengths: Sequence[int],
        stored: Tensor | None, width: int, scale: float, native: bool, buffers: int,
    ) -> None:
        self.dtype, self.scale, self.native = island_dtype(q), scale, native
        self.q, self.kv, self.shared = (x.to(self.dtype) for x in (q, kv, shared))
        self.heads, self.nope = q.shape[1], q.shape[2] - shared.shape[1]
        self.borders = pack_borders(tuple(lengths), q.device)
        self.selection = None if stored is None else Selection.of(self.borders, width, stored)
        rows, widest = min(QUERY_BLOCK, self.borders.total), self.borders.widest
        size = max(rows * widest, min(BUFFER_ELEMENTS, self.heads * rows * widest))
        self._buffers = [torch.empty(size, dtype=self.dtype, device=q.device) for _ in range(buffers)]

    def blocks(self) -> Iterator[tuple[slice, KeyRuns, TileMask, slice]]:
        """Blocks of queries, the keys they use, their mask, and heads that fit a buffer."""
        for queries, keys in blocks(self.borders):
            runs, mask = block_mask(self.borders, self.selection, queries, keys, self.dtype, self.native)
            if not runs.width:
                continue
            rows = queries.stop - queries.start
            step = max(1, self._buffers[0].numel() // (rows * runs.width))
            for first in range(0, self.heads, step):
                yield queries, runs, mask, slice(first, min(first + step, self.heads))

    def buffer(self, n: int, heads: slice, rows: int, width: int) -> Tensor:
        """[heads, rows, width] of buffer n."""
        shape = (heads.stop - heads.start, rows, width)
        return self._buffers[n][: shape[0] * rows * width].view(shape)

    def queries(self, queries: slice, heads: slice) -> tuple[Tensor, Tensor]:
        """Scaled queries [heads, q, K] and their shared part [heads, q, P]."""
        q = (self.q[queries, heads] * self.scale).transpose(0, 1)
        return q[..., : self.nope], q[..., self.nope :]

    def keys(self, run: slice, heads: slice) -> Tensor:
        """[heads, s, K]."""
        return self.kv[run, heads, : self.nope].transpose(0, 1)

    def values(self, run: slice, heads: slice) -> Tensor:
        """[heads, s, V]."""
        return self.kv[run, heads, self.nope :].transpose(0, 1)

    def scores(self, queries: slice, runs: KeyRuns, heads: slice) -> Tensor:
        """[heads, q, s] of the keys in runs, in buffer 0, not masked."""
        q_nope, q_shared = self.queries(queries, heads)
        out = self.buffer(0, heads, queries.stop - queries.start, runs.width)
        for run, place in runs:
            part = out[..., place]
            torch.bmm(q_nope, self.keys(run, heads).mT, out=part)
            if q_shared.shape[-1]:
                shared = self.shared[run].mT
                part.baddbmm_(q_shared, shared.expand(len(part), -1, -1))
        return out


@custom_op("trimtab::attention_tiles_fwd")
def _forward(
    q: Tensor, kv: Tensor, shared: Tensor, lengths: Sequence[int], stored: Tensor | None,
    width: int, scale: float, native: bool,
) -> tuple[Tensor, Tensor]:
    tiles = _Tiles(q, kv, shared, lengths, stored, width, scale, native, buffers=1)
    out, lse = _outputs(q, kv, shared, zero=True)
    for queries, runs, mask, heads in tiles.blocks():
        p = tiles.scores(queries, runs, heads)
        rows_lse, weight = mask.softmax(p)
        lse[heads, queries] = rows_lse
        mixed = out.new_zeros(len(p), p.shape[1], out.shape[-1])
        for run, place in runs:
            mixed.baddbmm_(p[..., place], tiles.values(run, heads))
        out[queries, heads] = mixed.mul_(weight.unsqueeze(-1)).transpose(0, 1)
    return out, lse


def _outputs(q: Tensor, kv: Tensor, shared: Tensor, *, zero: bool = False) -> tuple[Tensor, Tensor]:
    total, heads, wide = q.shape
    value = kv.shape[2] - (wide - shared.shape[1])
    dtype = island_dtype(q)
    make = q.new_zeros if zero else q.new_empty
    return make(total, heads, value, dtype=dtype), make(heads, total, dtype=dtype)


@_forward.register_fake
def _(
    q: Tensor, kv: Tensor, shared: Tensor, lengths: Sequence[int], stored: Tensor | None,
    width: int, scale: float, native: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(q, kv, shared)


@custom_op("trimtab::attention_tiles_bwd")
def _backward(
    grad: Tensor, q: Tensor, kv: Tensor, shared: Tensor, out: Tensor, lse: Tensor,
    lengths: Sequence[int], stored: Tensor | None, width: int, scale: float, native: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = _Tiles(q, kv, shared, lengths, stored, width, scale, native, buffers=2)
    nope = tiles.nope
    dq, dkv, dshared = (torch.zeros_like(x) for x in (tiles.q, tiles.kv, tiles.shared))
    grad = grad.to(tiles.dtype)
    delta = (grad * out).sum(-1).mT  # [H, T]
    for queries, runs, mask, heads in tiles.blocks():
        p = tiles.scores(queries, runs, heads)
        mask.probabilities(p, lse[heads, queries])
        go = grad[queries, heads].transpose(0, 1)
        ds = tiles.buffer(1, heads, p.shape[1], runs.width)
        for run, place in runs:
            dkv[run, heads, nope:].transpose(0, 1).baddbmm_(p[..., place].mT, go)
            torch.bmm(go, tiles.values(run, heads).mT, out=ds[..., place])
        mask.score_gradient(ds, p, delta[heads, queries])
        q_nope, q_shared = tiles.queries(queries, heads)
        dq_block = dq[queries, heads].transpose(0, 1)
        for run, place in runs:
            part = ds[..., place]
            dq_block[..., :nope].baddbmm_(part, tiles.keys(run, heads))
            dkv[run, heads, :nope].transpose(0, 1).baddbmm_(part.mT, q_nope)
            if q_shared.shape[-1]:
                shared = tiles.shared[run].expand(len(part), -1, -1)
                dq_block[..., nope:].baddbmm_(part, shared)
                dshared[run].addmm_(part.flatten(0, 1).mT, q_shared.flatten(0, 1))
    return dq.mul_(scale).to(q.dtype), dkv.to(kv.dtype), dshared.to(shared.dtype)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, kv: Tensor, shared: Tensor, out: Tensor, lse: Tensor,
    lengths: Sequence[int], stored: Tensor | None, width: int, scale: float, native: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(kv), torch.empty_like(shared)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, shared, lengths, stored, width, scale, native = inputs
    ctx.lengths, ctx.width, ctx.scale, ctx.native = lengths, width, scale, native
    ctx.save_for_backward(q, kv, shared, stored, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, kv, shared, stored, out, lse = ctx.saved_tensors
    found = torch.ops.trimtab.attention_tiles_bwd(
        grad, q, kv, shared, out, lse, ctx.lengths, stored, ctx.width, ctx.scale, ctx.native
    )
    return *found, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _pairs(lengths: Sequence[int]) -> int:
    return pack_borders(tuple(lengths), torch.device("cpu")).visited_pairs


@register_flop_formula(torch.ops.trimtab.attention_tiles_fwd)
def _forward_flops(
    q: Sequence[int], kv: Sequence[int], shared: Sequence[int], lengths: Sequence[int],
    *_: object, **__: object,
) -> int:
    # A key and a value together are as wide as what q and kv have beside each other.
    return 2 * _pairs(lengths) * q[1] * (kv[2] + shared[1])


@register_flop_formula(torch.ops.trimtab.attention_tiles_bwd)
def _backward_flops(
    grad: Sequence[int], q: Sequence[int], kv: Sequence[int], shared: Sequence[int],
    out: object, lse: object, lengths: Sequence[int], *_: object, **__: object,
) -> int:
    return 2 * _pairs(lengths) * q[1] * (3 * q[2] + 2 * grad[2])
