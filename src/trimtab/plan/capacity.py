"""What a capacity factor drops and saves, from a measured histogram of tokens per expert.

Knows: one histogram per layer. Does not know: where it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.errors import ConfigError
from trimtab.plan.memory import MemoryModel
from trimtab.plan.planner import Plan
from trimtab.plan.timing import TimeModel

FACTORS: tuple[float | None, ...] = (1.0, 1.25, 1.5, 2.0, 3.0, None)


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One capacity factor.

    Args:
        factor: most tokens per expert over the mean; None drops none.
        dropped: share of routed rows that are dropped.
        load: rows of the fullest rank over the mean.
        memory: bytes per rank.
        step_seconds: of a step.
    """

    factor: float | None
    dropped: float
    load: float
    memory: float
    step_seconds: float


def capacity_table(plan: Plan, histogram: Sequence[Sequence[float]]) -> list[CapacityRow]:
    """One row per factor for the chosen layout of a plan.

    Args:
        plan: with a layout.
        histogram: tokens per expert, one list per layer.

    Raises:
        ConfigError: a layer's list has another length than there are experts, or no tokens.
    """
    best = plan.best
    assert best is not None, "there is a layout"
    ep = best.layout.degrees.ep
    for index, layer in enumerate(histogram):
        if not layer or len(layer) % ep or min(layer) < 0 or sum(layer) <= 0:
            raise ConfigError(
                "TT102", f"histogram[{index}]",
                f"must be counts of tokens, as many as experts, a multiple of ep ({ep})",
                value=len(layer),
            )
    rows = []
    for factor in FACTORS:
        dropped, load = _cut(histogram, ep, factor)
        job = replace(best.job, routing=load, capacity_factor=None)
        memory = MemoryModel(plan.question.outline, job, plan.question.cluster).worst(best.layout)
        step = TimeModel(plan.question.outline, job, plan.question.cluster).step(best.layout)
        rows.append(CapacityRow(factor, dropped, load, memory.total, step.seconds))
    return rows


def _cut(
    histogram: Sequence[Sequence[float]], ep: int, factor: float | None
) -> tuple[float, float]:
    """Share of rows dropped over all layers, and the mean over layers of the fullest rank's load."""
    total = kept = load = 0.0
    for layer in histogram:
        mean = sum(layer) / len(layer)
        most = float("inf") if factor is None else factor * mean
        left = [min(count, most) for count in layer]
        per_rank = len(layer) // ep
        ranks = [sum(left[i * per_rank:(i + 1) * per_rank]) for i in range(ep)]
        total += sum(layer)
        kept += sum(left)
        load += max(ranks) / (sum(layer) / ep)
    return 1 - kept / total, load / len(histogram)
