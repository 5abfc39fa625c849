"""Pools of cached tokens against loops over queries and pools."""

from __future__ import annotations

import pytest
import torch

from tests.support.selection import DIM, HEADS, draw, naive_pools
from trimtab.ops.attention.pooling import PoolRule, pool_keys, select_cached_pools


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
    want = naive_pools(q, k, w, gates, bias, rule)[30:]
    assert [row.nonzero().flatten().tolist() for row in mask] == want


def test_short_sequences_keep_all_they_see() -> None:
    rule = PoolRule(4, 3, True)
    assert rule.width == 15
    assert rule.keeps_all(15)
    assert not rule.keeps_all(16)
    assert not PoolRule(4, 3, False).keeps_all(4)
    assert PoolRule(1, 3, False).keeps_all(3)
