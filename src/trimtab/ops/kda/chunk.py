"""KDA in chunks of C tokens: matrix products inside a chunk, a scan over chunks.

With G the inclusive cumulative sum of g inside a chunk and S the state before it:

    L_ij = beta_i sum_d k_i k_j exp(G_i - G_j)    (j < i)
    P_ij = sum_d q_i k_j exp(G_i - G_j)           (j <= i)
    (I + L) [U | W] = [beta v | beta k exp(G)]
    v'   = U - W S
    o    = (q exp(G)) S + P v'
    S   <- diag(exp(G_C)) S + (k exp(G_C - G))^T v'

Every decay is the exp of a difference that is not positive, found by recursive halving: between
two halves of a block the reference is the last row of the first half. That is exact for any gate.
Where the caller states a bound on g, the innermost blocks of 16 rows use one product with the
middle row as reference instead; with |g| <= 5 its exponents stay within 40.

Letters: M chunks, C chunk, H heads, K key dim, V value dim, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.kda.layout import ChunkLayout, chunk_layout
from trimtab.ops.precision import island_dtype

CHUNK = 32
# exp(-80) is far below float32 resolution of the retained state: a harder gate changes nothing.
GATE_FLOOR = -80.0
_BLOCK = 16
_BLOCK_EXPONENT = 40.0


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, gate_bound: float | None = None,
    layout: ChunkLayout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule in chunks; arguments and results as `kda_reference`.

    Args:
        q: [B, T, H, K], already L2-normed.
        k: [B, T, H, K], already L2-normed.
        v: [B, T, H, V].
        g: [B, T, H, K], log decay, <= 0; values under -80 count as -80.
        beta: [B, T, H].
        scale: factor on q.
        initial_state: [N, H, K, V] or None.
        output_final_state: also return the final states.
        cu_seqlens: [N+1] int; then B is 1.
        gate_bound: promise that g >= gate_bound.
        layout: the chunk layout of these sequences, if the caller already has it.
    """
    if layout is None:
        layout = chunk_layout(_lengths(k, cu_seqlens), CHUNK, k.device)
    dtype = island_dtype(g)
    c, heads = layout.chunk_size, k.shape[2]
    qc, kc, vc, gc = (_to_chunks(x, layout, dtype) for x in (q, k, v, g))  # [M, H, C, *]
    pad = layout.valid.view(-1, 1, c, 1)
    bc = _to_chunks(beta.unsqueeze(-1), layout, dtype) * pad
    # Padded slots neither decay nor write: g = 0 and beta = 0 leave the state as it is.
    cum = torch.cumsum(gc.clamp(min=GATE_FLOOR) * pad, 2)
    grown, last = torch.exp(cum), cum[:, :, -1:]
    fast = gate_bound is not None and -gate_bound * (_BLOCK // 2) <= _BLOCK_EXPONENT
    qc = qc * scale
    scores = _decayed_products(torch.stack((qc, kc)), kc, cum, c, fast)
    inside, lower = scores[0].tril(), (bc * scores[1]).tril(-1)
    rhs = torch.cat((bc * vc, bc * kc * grown), -1)
    solved = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    u, w = solved.split((vc.shape[-1], kc.shape[-1]), -1)
    kd = (kc * torch.exp(last - cum)).mT
    carry = torch.exp(last).mT  # [M, H, K, 1]
    state = _initial(initial_state, layout, (heads, k.shape[-1], v.shape[-1]), dtype, k.device)
    befores, deltas, final = _scan(u, w, kd, carry, state, layout)
    out = (qc * grown) @ befores + inside @ deltas
    flat = out.transpose(1, 2).reshape(-1, heads, v.shape[-1])[layout.scatter]
    shaped = flat.view(*v.shape).to(v.dtype)
    return shaped, _restore_order(final, layout) if output_final_state else None


def _lengths(k: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    if cu_seqlens is None:
        return [k.shape[1]] * k.shape[0]
    return torch.diff(cu_seqlens.long()).tolist()


def _to_chunks(x: Tensor, layout: ChunkLayout, dtype: torch.dtype) -> Tensor:
    """[B, T, H, X] -> [M, H, C, X]."""
    rows = x.flatten(0, 1).to(dtype)[layout.gather]
    return rows.view(-1, layout.chunk_size, *rows.shape[1:]).transpose(1, 2)


def _initial(
    given: Tensor | None, layout: ChunkLayout, shape: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if given is None:
        return torch.zeros(len(layout.order), *shape, dtype=dtype, device=device)
    return given.to(dtype)[layout.order]


def _scan(
    u: Tensor, w: Tensor, kd: Tensor, carry: Tensor, state: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """States before each chunk [M, H, K, V], deltas v' [M, H, C, V], final states [N, H, K, V]."""
    befores: list[Tensor] = []
    deltas: list[Tensor] = []
    finished: list[Tensor] = []
    begin = 0
    for alive in layout.steps:
        # Sequences are in order of falling length: those that ended are the last ones.
        finished.append(state[alive:])
        state = state[:alive]
        rows = slice(begin, begin + alive)
        delta = u[rows] - w[rows] @ state
        befores.append(state)
        deltas.append(delta)
        state = carry[rows] * state + kd[rows] @ delta
        begin += alive
    finished.append(state)
    final = torch.cat(finished[::-1])
    if not befores:
        return w.new_zeros(0, *state.shape[1:]), u, final
    return torch.cat(befores), torch.cat(deltas), final


def _restore_order(state: Tensor, layout: ChunkLayout) -> Tensor:
    return state[torch.argsort(layout.order)]


def _decayed_products(a: Tensor, b: Tensor, cum: Tensor, size: int, fast: bool) -> Tensor:
    """sum_d a_i b_j exp(G_i - G_j) for j <= i inside blocks of `size` rows; above it arbitrary.

    Args:
        a: [2, M, H, C, K], two left sides that share the decay.
        b: [M, H, C, K].
        cum: [M, H, C, K], cumulative log decay.
        size: rows per block, a power of two that divides C.
        fast: blocks of 16 rows may use one product.

    Returns:
        [2, M, H, C/size, size, size], without the block dimension where size is C.
    """
    if fast and size == _BLOCK:
        out = _block_products(a, b, cum, size)
    elif size == 1:
        out = (a * b).sum(-1)[..., None, None]
    else:
        out = _halved_products(a, b, cum, size, fast)
    return out.squeeze(-3) if size == b.shape[-2] else out


def _block_products(a: Tensor, b: Tensor, cum: Tensor, size: int) -> Tensor:
    a, b, cum = (x.unflatten(-2, (-1, size)) for x in (a, b, cum))
    middle = cum[..., size // 2 : size // 2 + 1, :]
    return (a * torch.exp(cum - middle)) @ (b * torch.exp(middle - cum)).mT


def _halved_products(a: Tensor, b: Tensor, cum: Tensor, size: int, fast: bool) -> Tensor:
    half = size // 2
    diagonal = _decayed_products(a, b, cum, half, fast)
    first, second = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
    a, b, cum = (x.unflatten(-2, (-1, size)) for x in (a, b, cum))
    border = cum[..., half - 1 : half, :]
    left = a[..., half:, :] * torch.exp(cum[..., half:, :] - border)
    right = b[..., :half, :] * torch.exp(border - cum[..., :half, :])
    across = left @ right.mT
    upper = torch.cat((first, torch.zeros_like(across)), -1)
    return torch.cat((upper, torch.cat((across, second), -1)), -2)
