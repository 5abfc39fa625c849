"""The Kimi Delta Attention layer: projections, short convolutions, gates, the scan."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.arch.spec import KDASpec
from trimtab.models.cache import KDACache
from trimtab.models.context import ForwardContext
from trimtab.models.linear import Linear, Weight
from trimtab.ops.backends import OpTable
from trimtab.ops.conv import short_conv_cached
from trimtab.ops.kda.gate import decay_gate
from trimtab.ops.kda.recurrent import kda_step
from trimtab.ops.norm import l2_norm
from trimtab.ops.precision import island_dtype


class KDA(nn.Module):
    """One KDA mixer.

    Args:
        spec: sizes and gate forms.
        d: hidden size.
        layer: decoder layer index, which finds the cache.
        dtype: storage dtype of matrices.
        island: storage dtype of what is stored as F32.
        ops: operators.
    """

    def __init__(
        self, spec: KDASpec, d: int, layer: int, dtype: torch.dtype, island: torch.dtype,
        ops: OpTable,
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.ops = spec, layer, ops
        p, conv = spec.width, (spec.width, 1, spec.conv_kernel)
        conv_dtype = island if spec.conv_dtype == "F32" else dtype
        island = island if spec.dtype == "F32" else dtype
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, p, dtype) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Weight(conv, conv_dtype) for _ in range(3))
        _add_low_rank(self, "f", spec.decay_rank, d, p, dtype)
        self.b_proj = Linear(d, spec.num_heads, dtype)
        self.A_log = nn.Parameter(torch.empty(spec.num_heads, dtype=island), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(p, dtype=island), requires_grad=False)
        _add_low_rank(self, "g", spec.gate_rank, d, p, dtype)
        self.o_norm = Weight((spec.head_dim,), conv_dtype)
        self.o_proj = Linear(p, d, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, D] -> [T, D]."""
        heads = (self.spec.num_heads, self.spec.head_dim)
        q, k, v = (y.unflatten(-1, heads) for y in self._convolved(x, ctx))
        z = self._low_rank("f", x, ctx).unflatten(-1, heads)
        g = decay_gate(z, self.A_log, self.dt_bias, self.spec.gate_lower_bound)
        beta_logits = self.b_proj(x, ctx)
        beta = torch.sigmoid(beta_logits.to(island_dtype(beta_logits)))
        o = self._scan(q, k, v.to(g.dtype), g, beta, ctx)
        gate = self._low_rank("g", x, ctx).unflatten(-1, heads)
        normed = self.ops.gated_norm(o, gate, self.o_norm.weight, self.spec.norm_eps)
        y: Tensor = self.o_proj(normed.flatten(-2), ctx)
        return y

    def _low_rank(self, leaf: str, x: Tensor, ctx: ForwardContext) -> Tensor:
        full = getattr(self, f"{leaf}_proj", None)
        if full is not None:
            y: Tensor = full(x, ctx)
            return y
        inner = getattr(self, f"{leaf}_a_proj")(x, ctx)
        narrow: Tensor = getattr(self, f"{leaf}_b_proj")(inner, ctx)
        return narrow

    def _convolved(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [T, P] after convolution and SiLU, q and k L2-normed per head."""
        inputs = (self.q_proj(x, ctx), self.k_proj(x, ctx), self.v_proj(x, ctx))
        weights = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        if ctx.cache is None:
            q, k, v = (
                self.ops.conv_silu(y, w, ctx.positions, self.spec.head_dim, normed)
                for y, w, normed in zip(inputs, weights, (True, True, False), strict=True)
            )
            return q, k, v
        cache = self._cache(ctx)
        if cache.tails is None:
            empty = x.new_zeros(len(ctx.lengths), self.spec.conv_kernel - 1, self.spec.width)
            cache.tails = (empty, empty, empty)
        (q, qt), (k, kt), (v, vt) = (
            short_conv_cached(y, w, tail, ctx.positions, ctx.sequence_ids)
            for y, w, tail in zip(inputs, weights, cache.tails, strict=True)
        )
        cache.tails = (qt, kt, vt)
        q, k = (l2_norm(y.unflatten(-1, (-1, self.spec.head_dim))).flatten(-2) for y in (q, k))
        return q, k, v

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """[T, H, V]: one step where every sequence brings one token, else chunks."""
        scale = self.spec.head_dim**-0.5
        cache = None if ctx.cache is None else self._cache(ctx)
        state = None if cache is None else cache.state
        if cache is not None and state is not None and set(ctx.lengths) == {1}:
            o, cache.state = kda_step(q, k, v, g, beta, scale, state)
            return o
        batch = (y.unsqueeze(0) for y in (q, k, v, g, beta))
        o, final = self.ops.kda(
            *batch, scale, state, cache is not None, ctx.cu_seqlens,
            gate_bound=self.spec.gate_lower_bound,
        )
        if cache is not None:
            cache.state = final
        return o.squeeze(0)

    def _cache(self, ctx: ForwardContext) -> KDACache:
        assert ctx.cache is not None, "only called while decoding"
        cache = ctx.cache.layers[self.layer]
        assert isinstance(cache, KDACache), "the cache was built for this architecture"
        return cache


def _add_low_rank(
    module: KDA, leaf: str, rank: int | None, d: int, p: int, dtype: torch.dtype
) -> None:
    if rank is None:
        module.add_module(f"{leaf}_proj", Linear(d, p, dtype))
        return
    module.add_module(f"{leaf}_a_proj", Linear(d, rank, dtype))
    module.add_module(f"{leaf}_b_proj", Linear(rank, p, dtype))
