"""Pooled keys for the indexer: whole pools of tokens are selected, and the open pool of the query.

An indexer over tokens is one over pools of a single token. Pool j of a sequence holds its tokens jm .. jm + m - 1, counted from the sequence's first token;
only complete pools have a key:

    kP_j[c] = sum_i softmax_i( u_{jm+i}[c] + b_i[c] ) k_{jm+i}[c]        u gate scores, b slot biases

A query may select a pool whose last token it sees. Of its own incomplete pool (the tail) it keeps
all tokens up to itself, if the model says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.ops.attention.indexer import index_scores, select_mask


@dataclass(frozen=True, slots=True)
class PoolRule:
    """How keys are pooled and selected; pools of one token make it a token indexer.

    Args:
        size: m, tokens per pool.
        count: pools kept per query.
        tail: the query's own incomplete pool is kept too.
    """

    size: int
    count: int
    tail: bool

    @property
    def width(self) -> int:
        """Most tokens that one query keeps."""
        return self.size * self.count + (self.size - 1 if self.tail else 0)

    def keeps_all(self, length: int) -> bool:
        """Whether every query of a sequence of this length keeps all it can see."""
        return (self.tail or self.size == 1) and length <= self.width

    def tail_starts(self, positions: Tensor) -> Tensor:
        """First position of the pool that is still open after the token at each position."""
        return (positions + 1) // self.size * self.size


def pool_keys(keys: Tensor, gates: Tensor, slot_bias: Tensor) -> Tensor:
    """One key per pool, weighed per channel.

    Args:
        keys: [..., m, K].
        gates: [..., m, K], scores of the tokens.
        slot_bias: [m, K].

    Returns:
        [..., K].
    """
    weights = torch.softmax(gates + slot_bias.to(gates.dtype), -2)
    return (weights * keys).sum(-2)


def pool_starts(lengths: tuple[int, ...], size: int) -> list[int]:
    """Positions in the pack of the first token of every complete pool.

    >>> pool_starts((7, 3, 4), 3)
    [0, 3, 7, 10]
    """
    found: list[int] = []
    begin = 0
    for length in lengths:
        found.extend(range(begin, begin + length // size * size, size))
        begin += length
    return found


@torch.no_grad()
def select_cached_pools(
    q: Tensor, pooled: Tensor, weights: Tensor, places: Tensor, length: int, rule: PoolRule
) -> Tensor:
    """Tokens that each new query keeps of its sequence's cache.

    Args:
        q: [N, t, H, K].
        pooled: [N, P, K]; keys of incomplete pools may hold anything.
        weights: [N, t, H].
        places: [N, t], index of each query in its sequence.
        length: S, tokens in the cache.
        rule: of the model.

    Returns:
        [N, t, S] bool.
    """
    device, place = q.device, places.unsqueeze(-1)
    last = (torch.arange(pooled.shape[1], device=device) + 1) * rule.size - 1
    chosen = select_mask(index_scores(q, pooled, weights), last <= place, rule.count)
    mask = chosen.repeat_interleave(rule.size, -1)[..., :length]
    mask = torch.nn.functional.pad(mask, (0, length - mask.shape[-1]))
    if not rule.tail:
        return mask
    slot = torch.arange(length, device=device)
    return mask | ((slot >= rule.tail_starts(place)) & (slot <= place))
