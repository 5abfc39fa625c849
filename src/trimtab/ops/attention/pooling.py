"""Pooled keys for the indexer: whole pools of tokens are selected, and the open pool of the query.

Pool j of a sequence holds its tokens jm .. jm + m - 1, counted from the sequence's first token;
only complete pools have a key:

    kP_j[c] = sum_i softmax_i( u_{jm+i}[c] + b_i[c] ) k_{jm+i}[c]        u gate scores, b slot biases

A query may select a pool whose last token it sees. Of its own incomplete pool (the tail) it keeps
all tokens up to itself, if the model says so.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.ops.attention.blockwise import PackBorders, blocks
from trimtab.ops.attention.indexer import index_scores, select_mask, write_selection


@dataclass(frozen=True, slots=True)
class PoolRule:
    """How keys are pooled and selected.

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
        return self.tail and length <= self.width

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


def tail_mask(rule: PoolRule, borders: PackBorders, queries: slice, keys: slice) -> Tensor:
    """[queries, keys] bool: tokens of the query's own open pool, up to the query."""
    device = borders.starts.device
    query = torch.arange(queries.start, queries.stop, device=device)
    begin = borders.starts[queries]
    first = begin + rule.tail_starts(query - begin)
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key >= first.unsqueeze(1)) & (key <= query.unsqueeze(1))


@torch.no_grad()
def select_pools(
    q: Tensor, pooled: Tensor, weights: Tensor, starts: list[int], rule: PoolRule,
    borders: PackBorders,
) -> Tensor:
    """Tokens that every query of a pack keeps, block by block; shapes as in `select_keys`.

    Args:
        q: [T, H, K].
        pooled: [P, K], one key per complete pool of the pack.
        weights: [T, H].
        starts: position of each pool's first token.
        rule: of the model.
        borders: of the pack.

    Returns:
        [T, rule.width] int32, ascending positions in the pack, -1 in unused slots.
    """
    out = torch.full((q.shape[0], rule.width), -1, dtype=torch.int32, device=q.device)
    first = torch.tensor(starts, dtype=torch.int64, device=q.device)
    slots = torch.arange(rule.size, device=q.device)
    for queries, keys in blocks(borders):
        low = bisect_left(starts, keys.start)
        high = bisect_left(starts, queries.stop - rule.size + 1)
        begins = first[low:high]
        query = torch.arange(queries.start, queries.stop, device=q.device).unsqueeze(1)
        visible = (begins + rule.size - 1 <= query) & (begins >= borders.starts[queries].unsqueeze(1))
        scores = index_scores(q[queries], pooled[low:high], weights[queries])
        row, pool = select_mask(scores, visible, rule.count).nonzero(as_tuple=True)
        mask = torch.zeros(query.shape[0], keys.stop - keys.start, dtype=torch.bool, device=q.device)
        mask[row.unsqueeze(1), begins[pool].unsqueeze(1) - keys.start + slots] = True
        if rule.tail:
            mask |= tail_mask(rule, borders, queries, keys)
        write_selection(out, mask, queries, keys)
    return out


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
