"""Indexers: which keys a query may attend to, over tokens or over pools of tokens.

They run without gradient. Both select for whole packs and for new tokens against a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.arch.spec import IndexerSpec
from trimtab.models.cache import MLACache
from trimtab.models.context import ForwardContext
from trimtab.models.linear import LayerNormWeights, Linear
from trimtab.models.padded import QUERIES, PaddedTokens
from trimtab.ops.attention.indexer import index_scores, select_mask
from trimtab.ops.attention.pooling import PoolRule, pool_keys, pool_starts, select_cached_pools
from trimtab.ops.attention.selection import Selection
from trimtab.ops.backends import OpTable
from trimtab.ops.norm import layer_norm
from trimtab.ops.precision import island_dtype, linear
from trimtab.ops.rope import rotate_head

# Cosines and sines [T, P/2] of the tokens of a pass.
Rotation = tuple[Tensor, Tensor]


class Indexer(nn.Module):
    """Token indexer."""

    def __init__(
        self, spec: IndexerSpec, d: int, q_in: int, dtype: torch.dtype, ops: OpTable
    ) -> None:
        super().__init__()
        self.spec, self.ops = spec, ops
        self.rule = PoolRule(1, spec.top_k, tail=False)
        self.wq_b = Linear(q_in, spec.heads * spec.dim, dtype)
        self.wk = Linear(d, spec.dim, dtype)
        self.k_norm = LayerNormWeights(spec.dim, dtype)
        self.weights_proj = Linear(d, spec.heads, dtype)

    @torch.no_grad()
    def queries(
        self, x: Tensor, q_latent: Tensor, rotation: Rotation | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Index queries [T, H, K] scaled by K^-1/2 and head weights [T, H] scaled by H^-1/2."""
        dtype = island_dtype(x)
        q = self.wq_b(q_latent, ctx).to(dtype).unflatten(-1, (self.spec.heads, self.spec.dim))
        q = self._rotated(q, rotation)
        w = self.weights_proj(x, ctx).to(dtype) * self.spec.heads**-0.5
        return q * self.spec.dim**-0.5, w

    @torch.no_grad()
    def keys(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """Index keys [T, K] in at least float32."""
        k = self.wk(x, ctx)
        normed = layer_norm(k, self.k_norm.weight, self.k_norm.bias, self.spec.norm_eps)
        return self._rotated(normed.to(island_dtype(x)), rotation)

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is None or self.spec.rope_layout is None:
            return x
        return rotate_head(x, *rotation, self.spec.rope_layout)

    def keeps_all(self, length: int) -> bool:
        """Whether every query of a sequence of this length keeps all it can see."""
        return self.rule.keeps_all(length)

    @torch.no_grad()
    def select(
        self, x: Tensor, q_latent: Tensor, rotation: Rotation | None, ctx: ForwardContext
    ) -> Selection:
        """The keys that each query of a pack keeps."""
        q, w = self.queries(x, q_latent, rotation, ctx)
        return self.ops.indexer(q, self.index_keys(x, rotation, ctx), w, self.rule, ctx.borders)

    @torch.no_grad()
    def index_keys(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """[P, K], what queries of a pack are scored against, one row per token or complete pool."""
        return self.keys(x, rotation, ctx)

    @torch.no_grad()
    def remember(
        self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext, cache: MLACache
    ) -> Tensor:
        """Add new tokens to the cache; [N, P, K], all that a query can be scored against."""
        new = self.keys(x, rotation, ctx)
        return cache.index.append(new, ctx.sequence_ids, ctx.slots, int(ctx.slots.max()) + 1)

    @torch.no_grad()
    def select_cached(
        self, x: Tensor, q_latent: Tensor, rotation: Rotation | None, ctx: ForwardContext,
        index: Tensor, queries: PaddedTokens, visible: Tensor,
    ) -> Tensor:
        """Choose from the cache.

        Args:
            x: [T, D], new tokens of N sequences.
            q_latent: [T, L] or x, what index queries are made of.
            rotation: of the new tokens; None where nothing is rotated.
            ctx: with a cache.
            index: [N, P, K] of `remember`.
            queries: how the T tokens lie beside each other.
            visible: [N, t, S] bool, the tokens up to each query.

        Returns:
            [N, t, S] bool, those of the visible tokens that are kept.
        """
        q, w = (queries.pad(part) for part in self.queries(x, q_latent, rotation, ctx))
        parts = zip(*(part.split(QUERIES, 1) for part in (q, w, queries.slots, visible)), strict=True)
        return torch.cat([self._choose(index, *part) for part in parts], 1)

    def _choose(self, index: Tensor, q: Tensor, w: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        """[N, t, S] bool of a few queries."""
        return select_mask(index_scores(q, index, w), visible, self.rule.count)


class PooledIndexer(Indexer):
    """Indexer over pools of tokens, whose keys a gate and slot biases weigh."""

    def __init__(
        self, spec: IndexerSpec, d: int, q_in: int, dtype: torch.dtype, ops: OpTable, pool: int
    ) -> None:
        super().__init__(spec, d, q_in, dtype, ops)
        self.rule = PoolRule(pool, spec.top_k // pool, spec.always_select_tail)
        self.index_kpool_compress_ape = nn.Parameter(
            torch.empty(pool, spec.dim, dtype=dtype), requires_grad=False
        )
        self.index_kpool_compress_gate = nn.Parameter(
            torch.empty(spec.dim, d, dtype=dtype), requires_grad=False
        )

    @torch.no_grad()
    def index_keys(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """[P, K], one row per complete pool of the pack."""
        starts = pool_starts(ctx.lengths, self.rule.size)
        first = torch.tensor(starts, dtype=torch.int64, device=x.device).unsqueeze(1)
        members = self._members(x, rotation, ctx)[first + torch.arange(self.rule.size, device=x.device)]
        return self._pooled(members)

    @torch.no_grad()
    def remember(
        self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext, cache: MLACache
    ) -> Tensor:
        """Add new tokens to the cache; [N, P, K], the last pool of a sequence may be open."""
        assert ctx.cache is not None, "only called with a cache"
        return self._extend(self._members(x, rotation, ctx), cache, ctx, ctx.cache.lengths)

    def _choose(self, index: Tensor, q: Tensor, w: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        """[N, t, S] bool of a few queries."""
        return select_cached_pools(q, index, w, places, visible.shape[-1], self.rule)

    def _extend(
        self, new: Tensor, cache: MLACache, ctx: ForwardContext, past: Tensor
    ) -> Tensor:
        """Write new tokens [T, 2K] behind the open pools; all pools so far, [N, P, K]."""
        m, store = self.rule.size, cache.pools
        count, offset = len(ctx.lengths), past % m  # [N], tokens in the open pool
        lengths = torch.tensor(ctx.lengths, device=new.device)
        most = int((offset + lengths).max()) // m + 1
        staged = new.new_zeros(count, most * m, new.shape[-1])
        if store.tail is not None:
            staged[:, :m] = store.tail
        staged[ctx.sequence_ids, offset[ctx.sequence_ids] + ctx.positions] = new
        groups = staged.unflatten(1, (most, m))
        rows = torch.arange(count, device=new.device)
        store.tail = groups[rows, (offset + lengths) // m]
        slots = (past // m).unsqueeze(1) + torch.arange(most, device=new.device)
        return store.pools.append(
            self._pooled(groups).flatten(0, 1), rows.repeat_interleave(most), slots.flatten(),
            int(slots.max()) + 1,
        )

    def _members(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        """[T, 2K], key and gate scores of each token."""
        gates = linear(x, self.index_kpool_compress_gate).to(island_dtype(x))
        return torch.cat((self.keys(x, rotation, ctx), gates), -1)

    def _pooled(self, members: Tensor) -> Tensor:
        """[..., m, 2K] -> [..., K]."""
        keys, gates = members.chunk(2, -1)
        return pool_keys(keys, gates, self.index_kpool_compress_ape)


def build_indexer(
    spec: IndexerSpec, d: int, q_in: int, dtype: torch.dtype, ops: OpTable
) -> Indexer:
    """The indexer that a spec says.

    Args:
        spec: heads, top_k, pools.
        d: hidden size.
        q_in: width of what index queries are made of.
        dtype: storage dtype.
        ops: operators.
    """
    if spec.pool is None:
        return Indexer(spec, d, q_in, dtype, ops)
    return PooledIndexer(spec, d, q_in, dtype, ops, spec.pool)
