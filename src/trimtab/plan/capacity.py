"""What a capacity factor drops and saves, from measured tokens per expert.

Knows: `experts.jsonl`, the file that training writes. Does not know: how it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.arch.outline import Outline
from trimtab.arch.spec import MoESpec
from trimtab.errors import ConfigError
from trimtab.plan.memory import MemoryModel
from trimtab.plan.planner import Plan
from trimtab.plan.timing import TimeModel
from trimtab.units import format_bytes, format_seconds

FACTORS: tuple[float | None, ...] = (1.0, 1.25, 1.5, 2.0, 3.0, None)
EXPERT_LOG = "experts.jsonl"
COLUMNS = ("capacity factor", "dropped", "fullest rank", "memory", "step")

Counts = Sequence[float]


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


def read_histogram(path: Path, outline: Outline) -> list[Counts]:
    """Tokens per expert of every layer and stretch of steps in a run's `experts.jsonl`.

    A stretch sums over its steps, so that what single micro-batches drop is at least what it shows.

    Args:
        path: the file, or a run directory that has one.
        outline: whose experts they must be.

    Raises:
        ConfigError: TT107 no such file; TT106 a line is no such row; TT105 another number of
            experts than the model has.
    """
    file = path / EXPERT_LOG if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError("TT107", "--histogram", "no such file", value=str(file)) from None
    found = [c for n, line in enumerate(text.splitlines(), 1) for c in _layers(line, f"{file}:{n}")]
    experts = {x.ffn.num_experts for x in outline.layers if isinstance(x.ffn, MoESpec)}
    for counts in found:
        if len(counts) not in experts:
            most = ", ".join(map(str, sorted(experts))) or "no"
            raise ConfigError("TT105", str(file), f"is of another model: this one has {most} experts",
                              value=f"{len(counts)} experts")
    if not found:
        raise ConfigError("TT106", str(file), "has no tokens of any expert")
    return found


def _layers(line: str, where: str) -> Iterator[Counts]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("TT106", where, f"not JSON: {error.msg}") from None
    tokens = row.get("tokens") if isinstance(row, Mapping) else None
    if not isinstance(tokens, Mapping):
        raise ConfigError("TT106", where, "must be an object with `tokens` by layer")
    for name, counts in tokens.items():
        good = isinstance(counts, list) and all(type(n) in (int, float) and n >= 0 for n in counts)
        if not good:
            raise ConfigError("TT106", f"{where}: tokens.{name}", "must list tokens of every expert")
        if sum(counts) > 0:
            yield counts


def capacity_table(plan: Plan, histogram: Sequence[Counts]) -> tuple[CapacityRow, ...]:
    """One row per factor for the chosen layout of a plan.

    Args:
        plan: with a layout.
        histogram: tokens per expert, as `read_histogram` returns them.
    """
    best, question = plan.best, plan.question
    assert best is not None, "there is a layout"
    rows = []
    for factor in FACTORS:
        dropped, load = _cut(histogram, best.layout.degrees.ep, factor)
        job = replace(best.job, routing=load)
        memory = MemoryModel(question.outline, job, question.cluster).worst(best.layout)
        step = TimeModel(question.outline, job, question.cluster).step(best.layout)
        rows.append(CapacityRow(factor, dropped, load, memory.total, step.seconds))
    return tuple(rows)


def _cut(histogram: Sequence[Counts], ep: int, factor: float | None) -> tuple[float, float]:
    """Share of rows dropped, and the mean load of the fullest rank over that of all, as routed."""
    total = kept = load = 0.0
    for counts in histogram:
        most = float("inf") if factor is None else factor * sum(counts) / len(counts)
        left = [min(count, most) for count in counts]
        per_rank = len(counts) // ep
        ranks = [sum(left[i * per_rank:(i + 1) * per_rank]) for i in range(ep)]
        total += sum(counts)
        kept += sum(left)
        load += max(ranks) / (sum(counts) / ep)
    return 1 - kept / total, load / len(histogram)


def capacity_rows(rows: Sequence[CapacityRow]) -> list[tuple[str, ...]]:
    """The table in words: factor, dropped share, fullest rank, memory, step."""
    return [
        ("none" if row.factor is None else f"{row.factor:g}", f"{row.dropped:.2%}",
         f"{row.load:.2f} x mean", format_bytes(row.memory), format_seconds(row.step_seconds))
        for row in rows
    ]
