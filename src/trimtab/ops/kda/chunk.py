"""KDA in chunks of C tokens by PyTorch: matrix products inside a chunk, a scan over chunks.

With G the inclusive cumulative sum of g inside a chunk, S the state before it and P, M the decayed
products of `scores`:

    L    = diag(beta) M
    (I + L) [U | W] = [beta v | beta k exp(G)]
    v'   = U - W S
    o    = (q exp(G)) S + P v'
    S   <- diag(exp(G_C)) S + (k exp(G_C - G))^T v'

Forward and backward go through the pack block by block (`blocks`), so that what they hold beside
inputs and outputs does not grow with T; backward begins each segment with its saved state and runs
it forward again. The decay needs no gradient tensors of its own:

    dG = q dq + k (dk_rows - dk_columns),  dg = its sum over later rows of the chunk.

Letters: J chunks and G sequences of a block, H heads, C chunk, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.ops.kda.blocks import Block, groups, segments
from trimtab.ops.kda.check import check_kda
from trimtab.ops.kda.pair import (
    CHUNK,
    GATE_FLOOR,
    Gradients,
    Segments,
    define_pair,
    run_pair,
)
from trimtab.ops.kda.scores import bounded, scores, scores_backward
from trimtab.ops.precision import island_dtype
from trimtab.ops.registry import OpCase

_SEGMENT_CHUNKS = 16
_SEGMENTS = Segments(_SEGMENT_CHUNKS * CHUNK)
# Chunks times heads of a block: enough for batched products, few enough for the cache.
_BATCH = 128


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, gate_bound: float | None = None,
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

    Raises:
        OperatorError: TT111, an argument is wrong.
    """
    check_kda(q, k, v, g, beta, initial_state, cu_seqlens)
    return run_pair(
        _KERNEL, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, gate_bound
    )


def workspace_bytes(case: OpCase) -> int:
    """Arrays of one block in the backward pass, the larger one, and the states kept for it."""
    shapes = case.shapes
    tokens, heads, key, value = (shapes[letter] for letter in "THKV")
    states = _SEGMENTS.rows(shapes["B"] * tokens, shapes["B"]) * heads * key * value
    chunks = max(heads * min(_SEGMENT_CHUNKS, -(-tokens // CHUNK)), _BATCH)
    block = CHUNK * (32 * key + 12 * value + 10 * CHUNK) + 5 * key * value
    return torch.promote_types(case.dtype, torch.float32).itemsize * (chunks * block + states)


class _Chunks(NamedTuple):
    """What one block's forward computes before its scan; [J, G, H, C, *] unless noted."""

    q: Tensor  # scaled
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor  # [..., 1]
    cum: Tensor
    P: Tensor  # [..., C, C]
    M: Tensor  # [..., C, C]
    U: Tensor
    W: Tensor
    grown: Tensor  # exp(G)
    left: Tensor  # exp(G_C - G)

    @property
    def carry(self) -> Tensor:
        """[J, G, H, K, 1]: decay of the state over a chunk."""
        return self.grown[..., -1:, :].mT


def _prepare(
    block: Block, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, fast: bool
) -> _Chunks:
    dtype = island_dtype(g)
    # Padded rows neither decay nor write: g = 0 and beta = 0 leave the state as it is.
    qc, kc, vc, gc, bc = (block.take(x, dtype) for x in (q, k, v, g, beta.unsqueeze(-1)))
    qc *= scale
    cum = torch.cumsum(gc.clamp(min=GATE_FLOOR), -2)
    P, M = scores(qc, kc, cum, fast)
    grown = torch.exp(cum)
    rhs = torch.cat((bc * vc, (bc * kc) * grown), -1)
    solved = torch.linalg.solve_triangular(bc * M, rhs, upper=False, unitriangular=True)
    U, W = solved.split((vc.shape[-1], kc.shape[-1]), -1)
    return _Chunks(qc, kc, vc, gc, bc, cum, P, M, U, W, grown, torch.exp(cum[..., -1:, :] - cum))


def _scan(c: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States before each chunk [J, G, H, K, V], deltas v' [J, G, H, C, V] and the state after."""
    befores = state.new_empty(c.q.shape[0], *state.shape)
    deltas = torch.empty_like(c.v)
    write, carry = (c.k * c.left).mT, c.carry
    for j in range(c.q.shape[0]):
        befores[j] = state
        torch.sub(c.U[j], c.W[j] @ state, out=deltas[j])
        state = carry[j] * state + write[j] @ deltas[j]
    return befores, deltas, state


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor, save: bool, gate_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    borders, fast = cu_seqlens.tolist(), bounded(gate_bound)
    heads, key = k.shape[1:]
    states = _SEGMENTS.empty(g, v, len(borders) - 1, save)
    final = states.new_zeros(len(borders) - 1, heads, key, v.shape[-1])
    if initial_state is not None:
        final.copy_(initial_state)
    out = torch.empty_like(v)
    for group in groups(borders, heads, _SEGMENT_CHUNKS, _BATCH):
        for block in segments(group, borders, _SEGMENT_CHUNKS, k.device):
            members = list(block.sequences)
            state = final[members]
            if save:
                states[_rows(block, borders)] = state
            c = _prepare(block, q, k, v, g, beta, scale, fast)
            befores, deltas, final[members] = _scan(c, state)
            block.put((c.q * c.grown) @ befores + c.P @ deltas, out)
    return out, final, states


def _rows(block: Block, borders: list[int]) -> list[int]:
    return [_SEGMENTS.first(n, borders[n]) + block.segment for n in block.sequences]


def _backward(
    dout: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, states: Tensor, cu_seqlens: Tensor, gate_bound: float | None,
) -> Gradients:
    borders, fast = cu_seqlens.tolist(), bounded(gate_bound)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dstate = dfinal.clone()
    for group in groups(borders, k.shape[1], _SEGMENT_CHUNKS, _BATCH):
        for block in reversed(segments(group, borders, _SEGMENT_CHUNKS, k.device)):
            members = list(block.sequences)
            c = _prepare(block, q, k, v, g, beta, scale, fast)
            befores, deltas, _ = _scan(c, states[_rows(block, borders)])
            do = block.take(dout, c.q.dtype)
            found = _block_backward(c, befores, deltas, do, dstate[members], fast)
            dstate[members] = found[-1]
            block.put(found[0].mul_(scale), dq)
            for x, into in zip(found[1:-1], (dk, dv, dg, dbeta.unsqueeze(-1)), strict=True):
                block.put(x, into)
    return dq, dk, dv, dg, dbeta, dstate


def _block_backward(
    c: _Chunks, befores: Tensor, deltas: Tensor, do: Tensor, dstate: Tensor, fast: bool
) -> Gradients:
    """Gradients of q (scaled), k, v, g, beta of a block and of the state before it."""
    d_deltas, d_afters, dstate = _scan_backward(c, do, dstate)
    dq = (do @ befores.mT) * c.grown
    dk_columns = (deltas @ d_afters.mT) * c.left
    # The decay over the whole chunk: of the state, and of what the chunk writes into it.
    edge = (d_afters * befores).sum(-1).unsqueeze(-2) * c.grown[..., -1:, :]
    edge += (c.k * dk_columns).sum(-2, keepdim=True)

    d_solved = torch.cat((d_deltas, -(d_deltas @ befores.mT)), -1)
    upper = (c.beta * c.M).mT
    d_rhs = torch.linalg.solve_triangular(upper, d_solved, upper=True, unitriangular=True)
    d_lower = (d_rhs @ torch.cat((c.U, c.W), -1).mT).tril(-1).neg_()
    d_values, d_keys = d_rhs.split((c.v.shape[-1], c.k.shape[-1]), -1)
    d_keys = d_keys * c.grown
    dbeta = (d_values * c.v).sum(-1, keepdim=True) + (d_keys * c.k).sum(-1, keepdim=True)
    dbeta += (d_lower * c.M).sum(-1, keepdim=True)

    d_scores = torch.stack(((do @ deltas.mT).tril(), c.beta * d_lower))
    near = scores_backward(d_scores, c.q, c.k, c.cum, fast)
    dq += near[0]
    dk_rows = near[1].addcmul_(c.beta, d_keys)
    dk_columns += near[2]
    # No gradient through the floor.
    d_cum = (c.q * dq).addcmul_(c.k, dk_rows - dk_columns)
    d_cum[..., -1:, :] += edge
    dg = d_cum.flip(-2).cumsum(-2).flip(-2).masked_fill_(c.g < GATE_FLOOR, 0)
    return dq, dk_rows + dk_columns, c.beta * d_values, dg, dbeta, dstate


def _scan_backward(c: _Chunks, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the deltas, of the state after each chunk, and of the state before all."""
    d_deltas = c.P.mT @ do
    d_afters = dstate.new_empty(c.q.shape[0], *dstate.shape)
    read = (c.q * c.grown).mT @ do
    write, carry, w = c.k * c.left, c.carry, c.W.mT
    for j in reversed(range(c.q.shape[0])):
        d_afters[j] = dstate
        d_deltas[j] += write[j] @ dstate
        dstate = carry[j] * dstate + read[j] - w[j] @ d_deltas[j]
    return d_deltas, d_afters, dstate


_KERNEL = define_pair("kda_chunk", _forward, _backward, _SEGMENTS)
