"""Pooled selection against loops over queries and pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trimtab.ops.attention.blockwise import QUERY_BLOCK, pack_borders
from trimtab.ops.attention.pooling import (
    PoolRule,
    pool_keys,
    pool_starts,
    select_cached_pools,
    select_pools,
)

HEADS, DIM = 8, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(q: Tensor, k: Tensor, w: Tensor, gates: Tensor, bias: Tensor, rule: PoolRule) -> list[list[int]]:
    """Kept tokens per query of one sequence, from the definition."""
    m, rows = rule.size, []
    for t in range(len(q)):
        scored = []
        for j in range((t + 1) // m):
            u = gates[j * m : (j + 1) * m] + bias
            share = u.exp() / u.exp().sum(0)
            key = sum(share[i] * k[j * m + i] for i in range(m))
            score = sum(float(w[t, h]) * max(0.0, float(q[t, h] @ key)) for h in range(HEADS))
            scored.append((-score, j))
        kept = [p for _, j in sorted(scored)[: rule.count] for p in range(j * m, (j + 1) * m)]
        tail = range((t + 1) // m * m, t + 1) if rule.tail else ()
        rows.append(sorted([*kept, *tail]))
    return rows


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(("size", "count"), [(4, 3), (2, 5), (1, 6), (3, 2)])
@pytest.mark.parametrize("lengths", [(40,), (5, 1, 23, 2), (QUERY_BLOCK - 3, 30)])
def test_packs_select_what_each_document_selects(
    lengths: tuple[int, ...], size: int, count: int, tail: bool
) -> None:
    rule, total = PoolRule(size, count, tail), sum(lengths)
    q, k, w = draw(total, HEADS, DIM), draw(total, DIM, seed=1), draw(total, HEADS, seed=2)
    gates, bias = draw(total, DIM, seed=3), draw(size, DIM, seed=4)
    starts = pool_starts(lengths, size)
    members = torch.tensor(starts).unsqueeze(1) + torch.arange(size)
    pooled = pool_keys(k[members], gates[members], bias)
    borders = pack_borders(lengths, torch.device("cpu"))
    found = select_pools(q, pooled, w, starts, rule, borders)
    assert found.shape == (total, rule.width)
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        want = naive(q[part], k[part], w[part], gates[part], bias, rule)
        for t, row in enumerate(want):
            kept = [p - begin for p in found[begin + t].tolist() if p >= 0]
            assert kept == row
        begin += length


@pytest.mark.parametrize("tail", [True, False])
def test_new_queries_select_from_a_cache_what_the_pack_selects(tail: bool) -> None:
    rule, length = PoolRule(4, 3, tail), 42
    q, k, w = draw(length, HEADS, DIM), draw(length, DIM, seed=1), draw(length, HEADS, seed=2)
    gates, bias = draw(length, DIM, seed=3), draw(4, DIM, seed=4)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 2)).unflatten(0, (11, 4)) for x in (k, gates)]
    pools = pool_keys(*padded, bias)  # the last one is not complete
    places = torch.arange(30, length)
    mask = select_cached_pools(
        q[30:].unsqueeze(0), pools.unsqueeze(0), w[30:].unsqueeze(0), places.unsqueeze(0), length, rule
    )[0]
    want = naive(q, k, w, gates, bias, rule)[30:]
    assert [row.nonzero().flatten().tolist() for row in mask] == want


def test_short_sequences_keep_all_they_see() -> None:
    rule = PoolRule(4, 3, True)
    assert rule.width == 15
    assert rule.keeps_all(15)
    assert not rule.keeps_all(16)
    assert not PoolRule(4, 3, False).keeps_all(4)
