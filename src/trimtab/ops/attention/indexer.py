"""Lightning indexer: which keys a query may attend to.

    I[t, s] = sum_h w[t, h] relu( q[t, h] . k[s] )
    selected_t = the top_k visible s by I[t, s]; of equal scores the lowest position wins

The positive constant factors of the released models (dim^-1/2, heads^-1/2) do not change the
ranking, yet they are applied by the caller, so that scores mean what the model means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.attention.blockwise import PackBorders, blocks, visible_mask


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Scores of every key for every query.

    Args:
        q: [..., t, H, K] index queries.
        k: [..., s, K] index keys, one head.
        weights: [..., t, H].

    Returns:
        [..., t, s] in the dtype of q.
    """
    products = torch.relu(torch.einsum("...thk,...sk->...ths", q, k))
    return torch.einsum("...ths,...th->...ts", products, weights)


def select_mask(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """[..., s] bool: the top_k visible keys; all visible ones where there are no more than top_k."""
    if scores.shape[-1] <= top_k:
        return visible
    scores = scores.masked_fill(~visible, float("-inf"))
    threshold = scores.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > threshold
    equal = (scores == threshold) & visible
    room = top_k - above.sum(-1, keepdim=True)
    return above | (equal & (torch.cumsum(equal, -1) <= room))


@torch.no_grad()
def select_keys(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, borders: PackBorders
) -> Tensor:
    """Selected keys of every query of a pack, block by block.

    Args:
        q: [T, H, K], like all three in at least float32.
        k: [T, K].
        weights: [T, H].
        top_k: keys kept per query.
        borders: of the pack.

    Returns:
        [T, top_k] int32, ascending positions in the pack, -1 in unused slots.
    """
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for queries, keys in blocks(borders):
        scores = index_scores(q[queries], k[keys], weights[queries])
        mask = select_mask(scores, visible_mask(borders, queries, keys), top_k)
        write_selection(out, mask, queries, keys)
    return out


def write_selection(out: Tensor, mask: Tensor, queries: slice, keys: slice) -> None:
    """Write the chosen positions of a block of queries, ascending, into their rows of `out`.

    Args:
        out: [T, S] int32, changed in place.
        mask: [queries, keys] bool, at most S per row.
        queries: rows of `out`.
        keys: positions of the columns of `mask`.
    """
    row, column = mask.nonzero(as_tuple=True)
    slot = (torch.cumsum(mask, 1) - 1)[row, column]
    out[row + queries.start, slot] = (column + keys.start).to(torch.int32)
