"""Lightning indexer: which keys a query may attend to.

    I[t, s] = sum_h w[t, h] relu( q[t, h] . k[s] )
    selected_t = the top_k visible s by I[t, s]; of equal scores the lowest position wins

The positive constant factors of the released models (dim^-1/2, heads^-1/2) do not change the
ranking, yet they are applied by the caller, so that scores mean what the model means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.attention import native
from trimtab.ops.attention.packs import QUERY_BLOCK


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


class BlockScorer:
    """Index scores block by block, in two buffers that all blocks share.

    Args:
        q: [T, H, K] index queries.
        keys: [S, K] index keys.
        weights: [T, H].
        widest: most keys of one block.
        use_native: whether the compiled kernel adds up heads.
    """

    def __init__(
        self, q: Tensor, keys: Tensor, weights: Tensor, widest: int, *, use_native: bool
    ) -> None:
        self.q, self.keys, self.weights = q, keys, weights
        self.native = use_native
        self._scores, self._products = (q.new_empty(QUERY_BLOCK * widest) for _ in range(2))

    def __call__(self, queries: slice, keys: slice) -> Tensor:
        """[queries, keys], valid until the next call."""
        rows, width = queries.stop - queries.start, keys.stop - keys.start
        scores = self._scores[: rows * width].view(rows, width)
        products = self._products[: rows * width].view(rows, width)
        transposed = self.keys[keys].mT
        scores.zero_()
        for head in range(self.q.shape[1]):
            torch.mm(self.q[queries, head], transposed, out=products)
            weight = self.weights[queries, head]
            if self.native:
                native.add_relu(scores, products, weight)
            else:
                scores.addcmul_(torch.relu_(products), weight.unsqueeze(1))
        return scores


def select_mask(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """[..., s] bool: the top_k visible keys; all visible ones where there are no more than top_k."""
    if scores.shape[-1] <= top_k:
        return visible
    scores = scores.masked_fill(~visible, float("-inf"))
    # NaN ranks highest: it must reach the output, not empty the selection.
    infinity = float("inf")
    scores.nan_to_num_(nan=infinity, posinf=infinity, neginf=-infinity)
    threshold = scores.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    chosen = (scores >= threshold) & visible
    # More than top_k only where several share the lowest score; rare, so only those rows are redone.
    tied = chosen.sum(-1) > top_k
    if bool(tied.any()):
        part, at = scores[tied], threshold[tied]
        equal = (part == at) & visible.expand_as(chosen)[tied]
        above = part > at
        room = top_k - above.sum(-1, keepdim=True)
        chosen[tied] = above | (equal & (torch.cumsum(equal, -1) <= room))
    return chosen
