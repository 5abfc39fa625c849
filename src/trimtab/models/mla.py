"""Multi-head latent attention: plain or gated, dense or over the keys an indexer selects.

A pack goes to the attention operator, which expands keys and values per head or absorbs kv_b into
the query and the output. Decoding caches the normed latent and the shared key part only, and
absorbs.

A layer whose indexer is shared takes over the selection of the layer before it: the selection is
an explicit value that goes in and comes out of every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.arch.spec import MLASpec
from trimtab.models.cache import MLACache
from trimtab.models.context import ForwardContext
from trimtab.models.indexer import Rotation, build_indexer
from trimtab.models.linear import Linear, RMSNorm
from trimtab.models.padded import QUERIES, PaddedTokens
from trimtab.ops.attention.operators import LatentKeys
from trimtab.ops.attention.selection import Selection
from trimtab.ops.backends import OpTable
from trimtab.ops.precision import island_dtype
from trimtab.ops.rope import rope_tables, rotate

# Keys of a pack, or a mask over cached ones.
Selected = Selection | Tensor


class MLA(nn.Module):
    """One MLA mixer.

    Args:
        spec: sizes, gate and indexer.
        d: hidden size.
        layer: decoder layer index.
        dtype: storage dtype.
        ops: operators.
    """

    def __init__(
        self, spec: MLASpec, d: int, layer: int, dtype: torch.dtype, ops: OpTable
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.ops = spec, layer, ops
        h, latent = spec.num_heads, spec.kv_lora_rank
        q_in = d
        if spec.q_lora_rank is None:
            self.q_proj = Linear(d, h * spec.qk_head_dim, dtype)
        else:
            q_in = spec.q_lora_rank
            self.q_a_proj = Linear(d, q_in, dtype)
            self.q_a_layernorm = RMSNorm(q_in, spec.latent_eps, dtype)
            self.q_b_proj = Linear(q_in, h * spec.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = Linear(d, latent + spec.qk_rope_head_dim, dtype)
        self.kv_a_layernorm = RMSNorm(latent, spec.latent_eps, dtype)
        kv_out = h * (spec.qk_nope_head_dim + spec.v_head_dim)
        self.kv_b_proj = Linear(latent, kv_out, dtype)
        self.g_proj = None
        if spec.gate is not None:
            g_out = h * spec.v_head_dim if spec.gate == "channel" else h
            self.g_proj = Linear(d, g_out, dtype)
        self.o_proj = Linear(h * spec.v_head_dim, d, dtype)
        self.indexer = None
        if spec.indexer is not None and spec.indexer.share == "full":
            self.indexer = build_indexer(spec.indexer, d, q_in, dtype, ops)

    def forward(
        self, x: Tensor, selected: Selected | None, ctx: ForwardContext
    ) -> tuple[Tensor, Selected | None]:
        """One mixer.

        Args:
            x: [T, D].
            selected: what the layer before selected, for a shared indexer; see the return value.
            ctx: the pack.

        Returns:
            [T, D], and the keys this layer attended to where it has an indexer: a selection, or a
            mask [N, t, S] over cached keys; None for all visible keys.
        """
        spec = self.spec
        q_latent = x
        if spec.q_lora_rank is not None:
            q_latent = self.q_a_layernorm(self.q_a_proj(x, ctx))
            q = self.q_b_proj(q_latent, ctx)
        else:
            q = self.q_proj(x, ctx)
        q = q.unflatten(-1, (spec.num_heads, spec.qk_head_dim))
        sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        latent, k_rope = self.kv_a_proj_with_mqa(x, ctx).split(sizes, -1)
        latent = self.kv_a_layernorm(latent)
        slots = ctx.slots
        rotation = None
        if spec.rope is not None:
            rotation = rope_tables(slots, spec.rope, spec.qk_rope_head_dim, island_dtype(x))
            q_nope, q_rope = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), -1)
            q = torch.cat((q_nope, rotate(q_rope, *rotation, spec.rope.layout)), -1)
            k_rope = rotate(k_rope, *rotation, spec.rope.layout)
        if ctx.begins:
            if ctx.cache is not None:
                self._remember(x, rotation, latent, k_rope, ctx)
            selected = self._selection(x, q_latent, rotation, selected, ctx)
            assert not isinstance(selected, Tensor), "packs are not masked"
            o = self._packed(q, latent, k_rope, selected, ctx)
        else:
            o, selected = self._cached(x, q_latent, rotation, q, latent, k_rope, selected, ctx)
        if self.g_proj is not None:
            gate = torch.sigmoid(self.g_proj(x, ctx))
            o = o * gate.view(*o.shape[:-1], -1)
        y: Tensor = self.o_proj(o.flatten(-2), ctx)
        return y, selected

    def _packed(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, selection: Selection | None,
        ctx: ForwardContext,
    ) -> Tensor:
        """[T, H, V] of a pack."""
        spec, kv_b = self.spec, self.kv_b_proj
        per_head = spec.qk_nope_head_dim + spec.v_head_dim
        dropped = kv_b.lora is not None and kv_b.lora.dropout > 0 and ctx.dropout is not None
        keys = LatentKeys(
            latent, k_rope,
            lambda: kv_b(latent, ctx).unflatten(-1, (spec.num_heads, per_head)),
            None if dropped else
            lambda: kv_b.effective_weight(island_dtype(latent)).unflatten(0, (spec.num_heads, per_head)),
            spec.v_head_dim,
        )
        return self.ops.attention(q, keys, spec.softmax_scale, ctx.borders, selection)

    def _selection(
        self, x: Tensor, q_latent: Tensor, rotation: Rotation | None, before: Selected | None,
        ctx: ForwardContext,
    ) -> Selected | None:
        """Keys of every query of a pack; None keeps all it can see."""
        if self.spec.indexer is None:
            return None
        indexer = self.indexer
        if indexer is None:
            return before
        if indexer.keeps_all(max(ctx.lengths, default=0)):
            return None  # exactly dense
        return ctx.choose(
            self.layer, "selection", lambda: indexer.select(x, q_latent, rotation, ctx)
        )

    def _cached(
        self, x: Tensor, q_latent: Tensor, rotation: Rotation | None, q: Tensor, latent: Tensor,
        k_rope: Tensor, selected: Selected | None, ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, H, V] against cached latents, with kv_b absorbed, and the mask [N, t, S] used."""
        wide, queries = island_dtype(x), PaddedTokens(ctx, ctx.slots)
        keys, index = self._remember(x, rotation, latent, k_rope, ctx)
        visible = torch.arange(keys.shape[1], device=x.device) <= queries.slots.unsqueeze(-1)
        if self.indexer is not None and index is not None:
            visible = self.indexer.select_cached(x, q_latent, rotation, ctx, index, queries, visible)
        elif self.spec.indexer is not None and selected is not None:
            assert isinstance(selected, Tensor), "cached keys are masked"
            visible = selected
        # Scores of a few queries at a time: a long piece of a prompt must not cost t x S per head.
        parts = zip(queries.pad(q.to(wide)).split(QUERIES, 1), visible.split(QUERIES, 1), strict=True)
        o = torch.cat([self._absorbed(part, keys, seen) for part, seen in parts], 1)
        return queries.unpad(o).to(x.dtype), None if self.spec.indexer is None else visible

    def _remember(
        self, x: Tensor, rotation: Rotation | None, latent: Tensor, k_rope: Tensor,
        ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor | None]:
        """Add new tokens to the cache; all latents so far [N, S, L + rope], and all index keys."""
        assert ctx.cache is not None, "only called with a cache"
        cache = ctx.cache.layers[self.layer]
        assert isinstance(cache, MLACache), "the cache was built for this architecture"
        wide, slots = island_dtype(x), ctx.slots
        new = torch.cat((latent.to(wide), k_rope.to(wide)), -1)
        keys = cache.latents.append(new, ctx.sequence_ids, slots, int(slots.max()) + 1)
        if self.indexer is None:
            return keys, None
        return keys, self.indexer.remember(x, rotation, ctx, cache)

    def _absorbed(self, q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """[N, t, H, V] from q [N, t, H, K], keys [N, S, L + rope] and visible [N, t, S]."""
        heads, nope = self.spec.num_heads, self.spec.qk_nope_head_dim
        up = self.kv_b_proj.effective_weight(q.dtype).unflatten(0, (heads, -1))
        q_latent = torch.einsum("nthk,hkl->nthl", q[..., :nope], up[:, :nope])
        full = torch.cat((q_latent, q[..., nope:]), -1)
        scores = torch.einsum("nthl,nsl->nths", full, keys) * self.spec.softmax_scale
        scores = scores.masked_fill(~visible.unsqueeze(2), float("-inf"))
        # A query that may see nothing takes nothing.
        p = torch.softmax(scores, -1).masked_fill(~visible.any(-1)[..., None, None], 0.0)
        mixed = torch.einsum("nths,nsl->nthl", p, keys[..., : self.spec.kv_lora_rank])
        return torch.einsum("nthl,hvl->nthv", mixed, up[:, nope:])
