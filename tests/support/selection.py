"""What an indexer selects, by loops over queries and pools."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.attention.pooling import PoolRule

HEADS, DIM = 8, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_pools(
    q: Tensor, k: Tensor, w: Tensor, gates: Tensor, bias: Tensor, rule: PoolRule
) -> list[list[int]]:
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
