"""Pieces of the KDA kernels: chunks of 16 tokens of one head, all in registers.

Decays are exponentials of G_i - G_j with i >= j, which are never positive, so any gate is exact.
Letters as in `ops/kda/chunk.py`; C is 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trimtab.ops.triton.common import exact


@triton.jit
def load_rows(x, first, count, stride, width, C: tl.constexpr, BLOCK: tl.constexpr):
    """[C, BLOCK] float32 of rows `first...`, zero beyond `count` rows or `width` columns."""
    row, at = tl.arange(0, C), tl.arange(0, BLOCK)
    inside = (row[:, None] < count) & (at[None, :] < width)
    where = x + (first + row[:, None]).to(tl.int64) * stride + at[None, :]
    return tl.load(where, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, value, first, count, stride, width, C: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of `load_rows`."""
    row, at = tl.arange(0, C), tl.arange(0, BLOCK)
    inside = (row[:, None] < count) & (at[None, :] < width)
    where = x + (first + row[:, None]).to(tl.int64) * stride + at[None, :]
    tl.store(where, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_column(x, first, count, stride, C: tl.constexpr):
    """[C] float32, one number per row."""
    row = tl.arange(0, C)
    where = x + (first + row).to(tl.int64) * stride
    return tl.load(where, mask=row < count, other=0.0).to(tl.float32)


@triton.jit
def row_of(x, j, C: tl.constexpr):
    """Row j of [C, N]."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == j, x, 0.0), 0)


@triton.jit
def column_of(x, j, C: tl.constexpr):
    """Column j of [C, C]."""
    return tl.sum(tl.where(tl.arange(0, C)[None, :] == j, x, 0.0), 1)


@triton.jit
def decay_from(cum, j, C: tl.constexpr):
    """exp(G_i - G_j) for i >= j, else 0: [C, N]."""
    after = tl.arange(0, C)[:, None] >= j
    return tl.where(after, tl.exp(tl.minimum(cum - row_of(cum, j, C)[None, :], 0.0)), 0.0)


@triton.jit
def scores(q, k, cum, C: tl.constexpr):
    """P (with the diagonal) and M (below it): decayed q k^T and k k^T."""
    P = tl.zeros((C, C), tl.float32)
    M = tl.zeros((C, C), tl.float32)
    row, column = tl.arange(0, C), tl.arange(0, C)[None, :]
    for j in range(C):
        decayed = decay_from(cum, j, C) * row_of(k, j, C)[None, :]
        P = tl.where(column == j, tl.sum(q * decayed, 1)[:, None], P)
        below = tl.where(row > j, tl.sum(k * decayed, 1), 0.0)
        M = tl.where(column == j, below[:, None], M)
    return P, M


@triton.jit
def unit_inverse(L, C: tl.constexpr):
    """(I + L)^-1 of a strictly lower [16, 16] L, exact: L^16 = 0."""
    one = tl.where(tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :], 1.0, 0.0)
    L2 = exact(L, L)
    L4 = exact(L2, L2)
    L8 = exact(L4, L4)
    low = exact(one - L, one + L2)
    return exact(exact(low, one + L4), one + L8)


@triton.jit
def scores_backward(dP, dM, q, k, cum, C: tl.constexpr, BLOCK: tl.constexpr):
    """Through `scores`: gradients of q, of k as a row and of k as a column, [C, BLOCK] each."""
    dq = tl.zeros((C, BLOCK), tl.float32)
    d_rows = tl.zeros((C, BLOCK), tl.float32)
    d_columns = tl.zeros((C, BLOCK), tl.float32)
    row = tl.arange(0, C)[:, None]
    for j in range(C):
        decay = decay_from(cum, j, C)
        decayed = decay * row_of(k, j, C)[None, :]
        p, m = column_of(dP, j, C)[:, None], column_of(dM, j, C)[:, None]
        dq += p * decayed
        d_rows += m * decayed
        d_columns = tl.where(row == j, tl.sum((p * q + m * k) * decay, 0)[None, :], d_columns)
    return dq, d_rows, d_columns


@triton.jit
def chunk_parts(q, k, v, beta, cum, C: tl.constexpr):
    """P, M, T = (I + beta M)^-1, U = T beta v, W = T beta k exp(G), exp(G), exp(G_C - G), exp(G_C)."""
    P, M = scores(q, k, cum, C)
    inverse = unit_inverse(beta[:, None] * M, C)
    grown = tl.exp(cum)
    last = row_of(cum, C - 1, C)
    U = exact(inverse, beta[:, None] * v)
    W = exact(inverse, beta[:, None] * k * grown)
    return P, M, inverse, U, W, grown, tl.exp(last[None, :] - cum), tl.exp(last)
