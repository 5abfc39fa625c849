"""Products of rows of one chunk under the decay between them, and their gradients.

    P_ij = sum_d q_i k_j exp(G_i - G_j)    (j <= i)
    M_ij = sum_d k_i k_j exp(G_i - G_j)    (j < i)

Every decay is the exp of a difference that is not positive, found by halving: between two halves of
a block the reference is the last row of the first half. That is exact for any gate. Where a bound
on g is known, blocks of 16 rows use one product with the middle row as reference instead; with
|g| <= 5 its exponents stay within 40.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 16
_BLOCK_EXPONENT = 40.0


def bounded(gate_bound: float | None) -> bool:
    """Whether a bound on g allows one product per block of 16 rows."""
    return gate_bound is not None and -gate_bound * (BLOCK // 2) <= _BLOCK_EXPONENT


def scores(q: Tensor, k: Tensor, cum: Tensor, fast: bool) -> Tensor:
    """P and M, zero above the diagonal.

    Args:
        q: [..., C, K], scaled.
        k: [..., C, K].
        cum: [..., C, K], inclusive cumulative log decay.
        fast: blocks of 16 rows may use one product.

    Returns:
        [2, ..., C, C].
    """
    rows = torch.stack((q, k))
    out = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
    for size, first, second in _levels(rows.shape[-2], fast):
        row_decay, column_decay = _decays(cum, size, first, second)
        left = _blocked(rows, size)[..., second, :] * row_decay
        right = _blocked(k, size)[..., first, :] * column_decay
        _diagonal(out, size)[..., second, first].copy_(left @ right.mT)
    if not fast:
        out.diagonal(0, -2, -1).copy_((rows * k).sum(-1))
    out[0].tril_()
    out[1].tril_(-1)
    return out


def scores_backward(
    d: Tensor, q: Tensor, k: Tensor, cum: Tensor, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, of k as row and of k as column.

    Args:
        d: [2, ..., C, C], gradients of P and M, zero where these are.
        q: [..., C, K].
        k: [..., C, K].
        cum: [..., C, K].
        fast: as in `scores`.
    """
    rows = torch.stack((q, k))
    by_row, by_column = torch.zeros_like(rows), torch.zeros_like(k)
    if not fast:
        diagonal = d[0].diagonal(0, -2, -1).unsqueeze(-1)
        by_row[0].addcmul_(diagonal, k)
        by_column.addcmul_(diagonal, q)
    for size, first, second in _levels(rows.shape[-2], fast):
        row_decay, column_decay = _decays(cum, size, first, second)
        left = _blocked(rows, size)[..., second, :] * row_decay
        right = _blocked(k, size)[..., first, :] * column_decay
        across = _diagonal(d, size)[..., second, first]
        _blocked(by_row, size)[..., second, :].addcmul_(across @ right, row_decay)
        both = torch.cat((across[0], across[1]), -2).mT @ torch.cat((left[0], left[1]), -2)
        _blocked(by_column, size)[..., first, :].addcmul_(both, column_decay)
    return by_row[0], by_row[1], by_column


def _levels(size: int, fast: bool) -> Iterator[tuple[int, slice, slice]]:
    """(rows per block, its columns, its rows): halves of ever smaller blocks."""
    while size > (BLOCK if fast else 1):
        yield size, slice(0, size // 2), slice(size // 2, size)
        size //= 2
    if fast:
        yield size, slice(0, size), slice(0, size)


def _decays(cum: Tensor, size: int, first: slice, second: slice) -> tuple[Tensor, Tensor]:
    blocks = _blocked(cum, size)
    middle = size // 2 if first == second else size // 2 - 1
    border = blocks[..., middle : middle + 1, :]
    return torch.exp(blocks[..., second, :] - border), torch.exp(border - blocks[..., first, :])


def _blocked(x: Tensor, size: int) -> Tensor:
    """[..., C, K] -> [..., C / size, size, K], a view."""
    return x.view(*x.shape[:-2], -1, size, x.shape[-1])


def _diagonal(x: Tensor, size: int) -> Tensor:
    """[..., C, C] -> [..., C / size, size, size], a view of the blocks on the diagonal."""
    count = x.shape[-1] // size
    blocks = x.view(*x.shape[:-2], count, size, count, size)
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)
