"""Before against after: differences with 95% confidence bounds.

Knows: counts and paired scores. Does not know: models, how an answer is scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson score interval of a proportion.

    >>> i = wilson(0, 100)
    >>> round(i.high, 3)
    0.037
    """
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    return Interval(p, max(0.0, centre - spread), min(1.0, centre + spread))


def paired_difference(
    before: Sequence[float], after: Sequence[float], weights: Sequence[float] | None = None
) -> Interval:
    """Bootstrap interval of the difference after - before over paired records.

    Args:
        before: one score (or sum, where weights are given) per record.
        after: the same records, afterwards.
        weights: denominators; the difference is then sum(after - before) / sum(weights), as for
            bits per byte. None is a weight of one each.
    """
    delta = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if delta.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    weight = np.ones_like(delta) if weights is None else np.asarray(weights, dtype=np.float64)
    # A fixed seed: the same two score lists give the same interval.
    rng = np.random.default_rng(0)
    means = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        rows = rng.integers(0, delta.size, delta.size)
        means[i] = delta[rows].sum() / weight[rows].sum()
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(delta.sum() / weight.sum()), float(low), float(high))
