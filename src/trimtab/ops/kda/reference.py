"""KDA as it is defined: a recurrence over tokens.

Per head, state S [K, V], S_0 = initial_state or 0:

    S'  = diag(exp(g_t)) S_{t-1}            decay along the key axis first
    u_t = beta_t (v_t - S'^T k_t)           the delta uses the decayed state
    S_t = S' + k_t u_t^T
    o_t = S_t^T (scale q_t)                 read after the update

Never optimised; runs in any floating dtype. Letters: B batch, T tokens, H heads, K key dim,
V value dim, N sequences.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trimtab.ops.kda.check import check_kda


def kda_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, gate_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule by recurrence.

    Args:
        q: [B, T, H, K], already L2-normed.
        k: [B, T, H, K], already L2-normed.
        v: [B, T, H, V].
        g: [B, T, H, K], log decay, <= 0.
        beta: [B, T, H], in (0, 1).
        scale: factor on q.
        initial_state: [N, H, K, V] or None for zeros.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N+1] int, borders of the sequences; then B is 1. Without it N is B.
        gate_bound: promise that g >= gate_bound, which the equation has no use for.

    Returns:
        o [B, T, H, V], and the final state [N, H, K, V] or None.

    Raises:
        OperatorError: TT111, an argument is wrong.
    """
    del gate_bound
    check_kda(q, k, v, g, beta, initial_state, cu_seqlens)
    batch, tokens, heads, key_dim = k.shape
    if cu_seqlens is None:
        borders = [(b * tokens, (b + 1) * tokens) for b in range(batch)]
    else:
        ends = cu_seqlens.tolist()
        borders = list(pairwise(ends))
    qf, kf, vf, gf, bf = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    outputs, finals = [], []
    for n, (begin, end) in enumerate(borders):
        if initial_state is None:
            state = vf.new_zeros(heads, key_dim, v.shape[-1], dtype=g.dtype)
        else:
            state = initial_state[n].to(g.dtype)
        for t in range(begin, end):
            decayed = torch.exp(gf[t]).unsqueeze(-1) * state
            error = vf[t] - torch.einsum("hkv,hk->hv", decayed, kf[t])
            delta = bf[t].unsqueeze(-1) * error
            state = decayed + torch.einsum("hk,hv->hkv", kf[t], delta)
            outputs.append(torch.einsum("hkv,hk->hv", state, scale * qf[t]))
        finals.append(state)
    out = torch.stack(outputs) if outputs else vf.new_zeros(0, heads, v.shape[-1])
    out = out.to(v.dtype).view(batch, tokens, heads, v.shape[-1])
    return out, torch.stack(finals) if output_final_state else None
