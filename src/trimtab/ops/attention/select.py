"""The keys that every query of a pack attends to, chosen block by block by an indexer.

Scores exist for one block of queries at a time, their products for one head of it, and the choice
is kept as packed bits, so memory grows with T where the selection itself does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.attention import native
from trimtab.ops.attention.indexer import BlockScorer, index_scores, select_mask
from trimtab.ops.attention.packs import PackBorders, blocks, pack_borders
from trimtab.ops.attention.pooling import PoolRule, pool_starts
from trimtab.ops.attention.selection import (
    Selection,
    new_selection,
    unpack_bits,
    write_bits,
    write_block,
)
from trimtab.ops.checks import check_shape, require
from trimtab.ops.custom import custom_op


@torch.no_grad()
def select(
    q: Tensor, pooled: Tensor, weights: Tensor, rule: PoolRule, borders: PackBorders, *,
    use_native: bool = False,
) -> Selection:
    """Selected keys of every query of a pack.

    Args:
        q: [T, H, K] index queries, like all three in at least float32.
        pooled: [P, K] index keys, one per complete pool of the pack (`pool_starts`).
        weights: [T, H].
        rule: size and number of the pools kept per query.
        borders: of the pack.
        use_native: whether the compiled kernels add up heads and select.

    Returns:
        Up to `rule.width` keys per query.
    """
    stored = torch.ops.trimtab.select_keys(
        q, pooled, weights, list(borders.lengths), rule.size, rule.count, rule.tail, use_native
    )
    return Selection.of(borders, rule.width, stored)


@torch.no_grad()
def select_reference(
    q: Tensor, pooled: Tensor, weights: Tensor, rule: PoolRule, borders: PackBorders
) -> Selection:
    """The same by its definition, one query at a time; arguments as for `select`."""
    starts = torch.tensor(pool_starts(borders.lengths, rule.size), dtype=torch.int64, device=q.device)
    rows = torch.full((borders.total, rule.width), -1, dtype=torch.int64, device=q.device)
    for t, begin in enumerate(borders.starts.tolist()):
        open_pools = (starts >= begin) & (starts + rule.size - 1 <= t)
        scores = index_scores(q[t : t + 1], pooled[open_pools], weights[t : t + 1])[0]
        best = scores.sort(descending=True, stable=True).indices[: rule.count]
        kept = starts[open_pools][best].unsqueeze(1) + torch.arange(rule.size, device=q.device)
        tail = torch.arange(begin + int(rule.tail_starts(torch.tensor(t - begin))), t + 1)
        found = torch.cat((kept.flatten(), tail.to(q.device))) if rule.tail else kept.flatten()
        rows[t, : len(found)] = found.sort().values
    return Selection.from_positions(rows, borders)


def check_index(
    q: Tensor, pooled: Tensor, weights: Tensor, rule: PoolRule, borders: PackBorders
) -> None:
    """Fail unless the arguments of `select` agree.

    Raises:
        OperatorError: TT111.
    """
    require(rule.size >= 1, "indexer.rule.size", "must be at least 1", rule.size)
    require(rule.count >= 1, "indexer.rule.count", "must be at least 1", rule.count)
    check_shape("indexer.q", q, "T H K", {"T": borders.total})
    pools = sum(n // rule.size for n in borders.lengths)
    check_shape("indexer.pooled", pooled, "P K", {"P": pools, "K": q.shape[2]})
    check_shape("indexer.weights", weights, "T H", {"T": borders.total, "H": q.shape[1]})
    for name, x in (("pooled", pooled), ("weights", weights)):
        require(x.dtype is q.dtype, f"indexer.{name}", f"must be {q.dtype} like q", x.dtype)


class _Pools:
    """Which pools the queries of a block see."""

    def __init__(self, borders: PackBorders, rule: PoolRule) -> None:
        self.rule, self.borders = rule, borders
        # Tokens are their own pools, and a long pack has many of them.
        tokens = range(borders.total)
        self.starts: Sequence[int] = tokens if rule.size == 1 else pool_starts(borders.lengths, rule.size)
        device = borders.starts.device
        self.begins = torch.tensor(list(self.starts), dtype=torch.int64, device=device)

    def blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Queries, keys, and the pools that lie among the keys."""
        for queries, keys in blocks(self.borders):
            low = bisect_left(self.starts, keys.start)
            high = bisect_left(self.starts, queries.stop - self.rule.size + 1)
            yield queries, keys, slice(low, max(low, high))

    @property
    def widest(self) -> int:
        """Most pools of one block."""
        return max((pools.stop - pools.start for _, _, pools in self.blocks()), default=0)

    def seen(self, queries: slice, pools: slice) -> tuple[Tensor, Tensor]:
        """[q] int32 each: columns from the first of the query's sequence to the last complete one."""
        device = self.borders.starts.device
        query = torch.arange(queries.start, queries.stop, device=device)
        begins = self.begins[pools]
        first = torch.searchsorted(begins, self.borders.starts[queries], out_int32=True)
        last = torch.searchsorted(begins + self.rule.size - 1, query, right=True, out_int32=True)
        return first, torch.maximum(first, last)

    def expand(self, chosen: Tensor, queries: slice, keys: slice, pools: slice) -> Tensor:
        """[q, pools] bool to [q, keys] bool, with the query's own open pool where the rule says so."""
        if self.rule.size == 1:
            return chosen
        slots = torch.arange(self.rule.size, device=chosen.device)
        mask = chosen.new_zeros(chosen.shape[0], keys.stop - keys.start)
        columns = (self.begins[pools].unsqueeze(1) - keys.start + slots).flatten()
        mask[:, columns] = chosen.repeat_interleave(self.rule.size, 1)
        return mask | tail_mask(self.rule, self.borders, queries, keys) if self.rule.tail else mask


def tail_mask(rule: PoolRule, borders: PackBorders, queries: slice, keys: slice) -> Tensor:
    """[queries, keys] bool: tokens of the query's own open pool, up to the query."""
    device = borders.starts.device
    query = torch.arange(queries.start, queries.stop, device=device)
    begin = borders.starts[queries]
    first = begin + rule.tail_starts(query - begin)
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key >= first.unsqueeze(1)) & (key <= query.unsqueeze(1))


@custom_op("trimtab::select_keys")
def _select(
    q: Tensor, pooled: Tensor, weights: Tensor, lengths: Sequence[int], size: int, count: int,
    tail: bool, use_native: bool,
) -> Tensor:
    rule, borders = PoolRule(size, count, tail), pack_borders(tuple(lengths), q.device)
    stored = new_selection(borders, rule.width, q.device)
    seen = _Pools(borders, rule)
    score = BlockScorer(q, pooled, weights, seen.widest, use_native=use_native)
    for queries, keys, pools in seen.blocks():
        first, last = seen.seen(queries, pools)
        scores = score(queries, pools)
        if not use_native:
            column = torch.arange(scores.shape[1], device=q.device)
            visible = (column >= first.unsqueeze(1)) & (column < last.unsqueeze(1))
            chosen = select_mask(scores, visible, count)
        else:
            bits = native.select_rows(scores, first, last, count)
            if size == 1 and stored.dtype is torch.uint8:
                write_bits(stored, borders, bits, queries)
                continue
            chosen = unpack_bits(bits, scores.shape[1])
        write_block(stored, borders, seen.expand(chosen, queries, keys, pools), queries, keys)
    return stored


@_select.register_fake
def _(
    q: Tensor, pooled: Tensor, weights: Tensor, lengths: Sequence[int], size: int, count: int,
    tail: bool, use_native: bool,
) -> Tensor:
    borders = pack_borders(tuple(lengths), q.device)
    return new_selection(borders, PoolRule(size, count, tail).width, q.device)


@register_flop_formula(torch.ops.trimtab.select_keys)
def _flops(
    q: Sequence[int], pooled: Sequence[int], weights: Sequence[int], lengths: Sequence[int],
    size: int, *_: object, **__: object,
) -> int:
    pairs = pack_borders(tuple(lengths), torch.device("cpu")).visited_pairs // size
    return 2 * pairs * q[1] * (q[2] + 1)
