"""KDA on CUDA devices: one program per sequence, head and block of value channels.

A program walks through its sequence in chunks of 16 tokens with the state in registers. For
training it leaves a state every 256 tokens; the backward pass runs each such segment forward again
into a scratch buffer, then walks it back. Sums over blocks of value channels are made afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.kda.check import check_kda
from trimtab.ops.kda.pair import GATE_FLOOR, Gradients, Segments, define_pair, run_pair
from trimtab.ops.precision import island_dtype
from trimtab.ops.triton.common import exact
from trimtab.ops.triton.kda_parts import (
    chunk_parts,
    load_column,
    load_rows,
    scores_backward,
    store_rows,
)

_CHUNK = 16
_SEGMENT_CHUNKS = 16
_SEGMENTS = Segments(_SEGMENT_CHUNKS * _CHUNK)
_VALUE_BLOCK = 32
_FLOOR = tl.constexpr(GATE_FLOOR)


def kda_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, gate_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule in float32; arguments and results as `kda_chunk`. Exact for any gate.

    Raises:
        OperatorError: TT111, an argument is wrong.
    """
    check_kda(q, k, v, g, beta, initial_state, cu_seqlens)
    return run_pair(
        _KERNEL, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, gate_bound
    )


@triton.jit
def _load_chunk(
    q, k, v, g, beta, first, count, head, part, scale, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Scaled q, k, v, G, beta of a chunk, zero beyond its rows, and where the gate is cut."""
    qc = load_rows(q + head * K, first, count, H * K, K, C, BK) * scale
    kc = load_rows(k + head * K, first, count, H * K, K, C, BK)
    vc = load_rows(v + head * V + part * BV, first, count, H * V, V - part * BV, C, BV)
    gc = load_rows(g + head * K, first, count, H * K, K, C, BK)
    bc = load_column(beta + head, first, count, H, C)
    return qc, kc, vc, tl.cumsum(tl.maximum(gc, _FLOOR), 0), bc, gc < _FLOOR


@triton.jit
def _state_at(states, index, head, part, H, K, V, BK: tl.constexpr, BV: tl.constexpr):
    """Addresses of [BK, BV] in states [index, H, K, V], and which of them exist."""
    row, at = tl.arange(0, BK)[:, None], part * BV + tl.arange(0, BV)[None, :]
    where = states + ((index * H + head).to(tl.int64) * K + row) * V + at
    return where, (row < K) & (at < V)


@triton.jit
def _forward_kernel(
    q, k, v, g, beta, scale, initial, borders, out, final, states, H, K, V,
    GIVEN: tl.constexpr, SAVE: tl.constexpr, C: tl.constexpr, SEGMENT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):
    n, head, part = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    begin, end = tl.load(borders + n), tl.load(borders + n + 1)
    S = tl.zeros((BK, BV), tl.float32)
    if GIVEN:
        where, exists = _state_at(initial, n, head, part, H, K, V, BK, BV)
        S = tl.load(where, mask=exists, other=0.0).to(tl.float32)
    for chunk in range(tl.cdiv(end - begin, C)):
        if SAVE:
            index = begin // (C * SEGMENT) + n + chunk // SEGMENT
            where, exists = _state_at(states, index, head, part, H, K, V, BK, BV)
            tl.store(where, S, mask=exists & (chunk % SEGMENT == 0))
        first = begin + chunk * C
        count = end - first
        qc, kc, vc, cum, bc, _cut = _load_chunk(
            q, k, v, g, beta, first, count, head, part, scale, H, K, V, C, BK, BV
        )
        P, _M, _I, U, W, grown, left, carry = chunk_parts(qc, kc, vc, bc, cum, C)
        delta = U - exact(W, S)
        o = exact(qc * grown, S) + exact(P, delta)
        store_rows(out + head * V + part * BV, o, first, count, H * V, V - part * BV, C, BV)
        S = carry[:, None] * S + exact(tl.trans(kc * left), delta)
    where, exists = _state_at(final, n, head, part, H, K, V, BK, BV)
    tl.store(where, S, mask=exists)


@triton.jit
def _chunk_backward(
    qc, kc, vc, bc, cum, cut, S, dS, do, C: tl.constexpr, BK: tl.constexpr
):
    """Gradients of scaled q, k, v, g, beta of a chunk, and of the state before it."""
    P, M, inverse, U, W, grown, left, carry = chunk_parts(qc, kc, vc, bc, cum, C)
    delta = U - exact(W, S)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    d_delta = exact(tl.trans(P), do) + exact(kc * left, dS)
    dq = exact(do, tl.trans(S)) * grown
    d_columns = exact(delta, tl.trans(dS)) * left
    edge = tl.sum(dS * S, 1) * carry + tl.sum(kc * d_columns, 0)
    before = carry[:, None] * dS + exact(tl.trans(qc * grown), do) - exact(tl.trans(W), d_delta)
    # Through the triangular solve: its transpose, then the lower triangle.
    back = tl.trans(inverse)
    d_values = exact(back, d_delta)
    d_keys = exact(back, -exact(d_delta, tl.trans(S)))
    d_lower = -exact(d_values, tl.trans(U)) - exact(d_keys, tl.trans(W))
    d_lower = tl.where(row > column, d_lower, 0.0)
    d_keys *= grown
    d_beta = tl.sum(d_values * vc, 1) + tl.sum(d_keys * kc, 1) + tl.sum(d_lower * M, 1)
    dP = tl.where(row >= column, exact(do, tl.trans(delta)), 0.0)
    near_q, d_rows, near_columns = scores_backward(dP, bc[:, None] * d_lower, qc, kc, cum, C, BK)
    dq += near_q
    d_rows += bc[:, None] * d_keys
    d_columns += near_columns
    d_cum = qc * dq + kc * (d_rows - d_columns)
    d_cum += tl.where(row == C - 1, edge[None, :], 0.0)
    # The sum over later rows; no gradient through the floor.
    dg = tl.where(cut, 0.0, tl.sum(d_cum, 0)[None, :] - tl.cumsum(d_cum, 0) + d_cum)
    return dq, d_rows + d_columns, bc[:, None] * d_values, dg, d_beta, before


@triton.jit
def _backward_kernel(
    dout, d_final, q, k, v, g, beta, scale, states, borders, scratch, dq, dk, dv, dg, d_beta,
    d_initial, H, K, V, T, C: tl.constexpr, SEGMENT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):
    n, head, part = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    begin, end = tl.load(borders + n), tl.load(borders + n + 1)
    program = tl.program_id(0) * tl.num_programs(1) + part
    where, exists = _state_at(d_final, n, head, part, H, K, V, BK, BV)
    dS = tl.load(where, mask=exists, other=0.0)
    tile = tl.arange(0, BK)[:, None] * BV + tl.arange(0, BV)[None, :]
    room = scratch + program.to(tl.int64) * SEGMENT * BK * BV + tile
    shift = part.to(tl.int64) * T * H  # this block's own partial sums
    segments = tl.cdiv(end - begin, C * SEGMENT)
    for back in range(segments):
        segment = segments - 1 - back
        index = begin // (C * SEGMENT) + n + segment
        where, exists = _state_at(states, index, head, part, H, K, V, BK, BV)
        S = tl.load(where, mask=exists, other=0.0)
        first = begin + segment * C * SEGMENT
        chunks = tl.minimum(tl.cdiv(end - first, C), SEGMENT)
        for chunk in range(chunks):
            tl.store(room + chunk * BK * BV, S)
            at = first + chunk * C
            qc, kc, vc, cum, bc, _cut = _load_chunk(
                q, k, v, g, beta, at, end - at, head, part, scale, H, K, V, C, BK, BV
            )
            _P, _M, _I, U, W, _grown, left, carry = chunk_parts(qc, kc, vc, bc, cum, C)
            S = carry[:, None] * S + exact(tl.trans(kc * left), U - exact(W, S))
        tl.debug_barrier()  # the states that all threads have written are read below
        for chunk in range(chunks):
            at = first + (chunks - 1 - chunk) * C
            count = end - at
            S = tl.load(room + (chunks - 1 - chunk) * BK * BV)
            qc, kc, vc, cum, bc, cut = _load_chunk(
                q, k, v, g, beta, at, count, head, part, scale, H, K, V, C, BK, BV
            )
            do = load_rows(dout + head * V + part * BV, at, count, H * V, V - part * BV, C, BV)
            gq, gk, gv, gg, gb, dS = _chunk_backward(qc, kc, vc, bc, cum, cut, S, dS, do, C, BK)
            store_rows(dq + (shift + head) * K, gq * scale, at, count, H * K, K, C, BK)
            store_rows(dk + (shift + head) * K, gk, at, count, H * K, K, C, BK)
            store_rows(dg + (shift + head) * K, gg, at, count, H * K, K, C, BK)
            store_rows(dv + head * V + part * BV, gv, at, count, H * V, V - part * BV, C, BV)
            row = tl.arange(0, C)
            tl.store(d_beta + shift + (at + row).to(tl.int64) * H + head, gb, mask=row < count)
        tl.debug_barrier()
    where, exists = _state_at(d_initial, n, head, part, H, K, V, BK, BV)
    tl.store(where, dS, mask=exists)


def _blocks(key: int, value: int) -> tuple[int, int]:
    """Powers of two of at least 16, which matrix products need."""
    wide = max(16, triton.next_power_of_2(value))
    return max(16, triton.next_power_of_2(key)), min(wide, _VALUE_BLOCK)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor, save: bool, gate_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = cu_seqlens.shape[0] - 1
    heads, key, value = k.shape[1], k.shape[2], v.shape[2]
    out = torch.empty_like(v)
    final = g.new_empty(sequences, heads, key, value, dtype=island_dtype(g))
    states = _SEGMENTS.empty(g, v, sequences, save)
    bk, bv = _blocks(key, value)
    if sequences * heads:
        _forward_kernel[(sequences * heads, triton.cdiv(value, bv))](
            q, k, v, g, beta, scale, final if initial_state is None else initial_state,
            cu_seqlens.to(q.device), out, final, states if save else final, heads, key, value,
            initial_state is not None, save, _CHUNK, _SEGMENT_CHUNKS, bk, bv,
        )
    return out, final, states


def _backward(
    dout: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, states: Tensor, cu_seqlens: Tensor, gate_bound: float | None,
) -> Gradients:
    sequences = cu_seqlens.shape[0] - 1
    (tokens, heads, key), value = k.shape, v.shape[2]
    bk, bv = _blocks(key, value)
    parts = triton.cdiv(value, bv)
    dq, dk, dg = (dfinal.new_zeros(parts, tokens, heads, key) for _ in range(3))
    d_beta = dfinal.new_zeros(parts, tokens, heads)
    dv, d_initial = torch.empty_like(v), torch.empty_like(dfinal)
    if sequences * heads:
        scratch = dfinal.new_empty(sequences * heads * parts * _SEGMENT_CHUNKS * bk * bv)
        _backward_kernel[(sequences * heads, parts)](
            dout, dfinal, q, k, v, g, beta, scale, states, cu_seqlens.to(q.device), scratch, dq,
            dk, dv, dg, d_beta, d_initial, heads, key, value, tokens, _CHUNK, _SEGMENT_CHUNKS, bk,
            bv,
        )
    gq, gk, gg, gb = (
        part.sum(0).to(x.dtype) for part, x in zip((dq, dk, dg, d_beta), (q, k, g, beta), strict=True)
    )
    return gq, gk, dv, gg, gb, d_initial


_KERNEL = define_pair("kda_triton", _forward, _backward, _SEGMENTS)
