"""A plan as plain values for JSON, and as the `parallel:` section of a recipe.

Knows: names and units of the output. Does not know: terminals, HTML.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TypedDict

import yaml

from trimtab.plan.capacity import CapacityRow
from trimtab.plan.memory import FRAGMENTATION_BAND, StageMemory
from trimtab.plan.network import distinct_groups
from trimtab.plan.placement import Degrees
from trimtab.plan.planner import Plan, limits_in_order
from trimtab.plan.question import Question
from trimtab.plan.search import Candidate, capacity
from trimtab.plan.whole_job import WholeJob
from trimtab.units import format_bytes, format_count, format_seconds


class Coverage(TypedDict):
    """How a prediction is backed: shares of time and of bytes."""

    time_from_measured: float
    time_from_roofline: float
    bytes_from_inventory: float
    bytes_from_formulas: float


@dataclass(frozen=True, slots=True)
class Extras:
    """What was asked for beside the layout.

    Args:
        job: the whole job of a recipe.
        capacities: what capacity factors drop and save.
        notes: what the recipe asks for and the plan does not count.
    """

    job: WholeJob | None = None
    capacities: tuple[CapacityRow, ...] = ()
    notes: tuple[str, ...] = ()


def plan_as_dict(plan: Plan, extras: Extras | None = None) -> dict[str, object]:
    """The whole plan; bytes, seconds and tokens per second throughout."""
    extras = extras or Extras()
    question, job = plan.question, plan.question.job
    shown = [plan.best, *plan.found.candidates[1:]] if plan.best else []
    return {
        "model": question.outline.name,
        "family": question.outline.family,
        "trained_by_trimtab": question.outline.is_trained,
        "cluster": question.cluster.name,
        "placement": plan.headline,
        "devices": question.ranks,
        "goal": question.goal,
        "feasible": plan.best is not None,
        "method": job.method,
        "base_dtype": job.base_dtype,
        "seq_len": job.seq_len,
        "tokens_per_step": job.seq_len * job.global_batch,
        "memory_limit_bytes": capacity(question.cluster),
        "binding_limit": plan.binding_limit,
        "worst_input_grade": plan.worst_grade,
        "weak_inputs": list(plan.weak_inputs),
        "changes": [asdict(change) for change in plan.changes],
        "bands": [asdict(band) for band in plan.bands],
        "stages": [_memory(memory) for memory in plan.stages],
        "coverage": coverage(plan),
        "parallel": parallel_section(plan.best) if plan.best else None,
        "layouts": [_layout(plan, c) for c in shown if c is not None],
        "layouts_tried": plan.found.tried,
        "job": None if extras.job is None else job_as_dict(extras.job),
        "not_planned": list(extras.notes),
        "capacity_factors": [asdict(row) for row in extras.capacities],
    }


def million_cost(question: Question, tokens_per_second: float) -> float | None:
    """Cost of a million tokens on all ranks, in the cluster's currency; None without a price."""
    price = question.cluster.price
    return None if price is None else price * question.ranks / 3600 / tokens_per_second * 1e6


def job_as_dict(job: WholeJob) -> dict[str, object]:
    """The whole job; hours, bytes, tokens."""
    memory, disk = job.host_has
    return {
        "steps": job.work.steps, "tokens": job.tokens, "data": job.work.data,
        "hours": job.hours, "total_hours": job.total_hours, "band_hours": list(job.band_hours),
        "save_every_s": job.saving.interval, "lost_share": job.saving.waste,
        "saved_state_bytes": job.saved_bytes,
        "host_memory_bytes": job.host_memory, "host_memory_available_bytes": memory,
        "host_disk_bytes": job.host_disk, "host_disk_available_bytes": disk,
        "shared_storage_bytes": job.shared_storage,
        "cost": job.cost, "currency": job.currency,
    }


def _end(job: WholeJob, start: datetime) -> str:
    early, late = (start + timedelta(hours=hours) for hours in job.band_hours)
    return f"{start + timedelta(hours=job.total_hours):%a %Y-%m-%d %H:%M} ({early:%a %H:%M} to {late:%a %H:%M})"


def job_rows(job: WholeJob, start: datetime) -> list[tuple[str, str]]:
    """Names and values of a whole job, in words.

    Args:
        job: the job.
        start: when its download begins.
    """
    rows = [("steps", f"{job.work.steps:,}"), ("tokens", format_count(job.tokens))]
    if job.work.data:
        rows.append(("data", job.work.data))
    rows += [(name, format_seconds(hours * 3600)) for name, hours in job.hours.items() if hours]
    low, high = (format_seconds(hours * 3600) for hours in job.band_hours)
    memory, disk = map(format_bytes, job.host_has)
    rows += [
        ("from download to last score",
         f"{format_seconds(job.total_hours * 3600)} ({low} to {high}, balanced to worst routing)"),
        (f"begun {start:%a %Y-%m-%d %H:%M}, it ends", _end(job, start)),
        ("a saved state", format_bytes(job.saved_bytes)),
        ("save every", format_seconds(job.saving.interval)),
        ("lost to saving and failures", f"{job.saving.waste:.2%}"),
        ("memory of a host", f"{format_bytes(job.host_memory)} of {memory}"),
        ("disk of a host", f"{format_bytes(job.host_disk)} of {disk}"),
        ("storage for all hosts", format_bytes(job.shared_storage)),
    ]
    if job.cost is not None:
        digits = 0 if job.cost >= 100 else 2
        rows.append(("cost, from load to evaluation", f"{job.cost:,.{digits}f} {job.currency}"))
    return rows


def _layout(plan: Plan, c: Candidate) -> dict[str, object]:
    degrees = asdict(c.layout.degrees)
    return {
        **degrees,
        "dispatcher": c.layout.dispatcher,
        "dispatcher_seconds": c.exchanges,
        "recompute": "layer" if c.job.recompute.layers == "all" else "none",
        "base": "resident" if c.layout.resident else "sharded",
        "stages": [stage.num_layers for stage in c.layout.stages],
        "memory_per_rank_bytes": {
            **c.memory.lines, "allocated": c.memory.allocated, "reserved": c.memory.reserved,
            "total": c.memory.total,
        },
        "reserved_band_bytes": [c.memory.allocated * share for share in FRAGMENTATION_BAND],
        "host_bytes_per_rank": c.memory.host,
        "step_time_s": c.step.seconds,
        "step_parts_s": c.step.parts,
        "tokens_per_second": c.tokens_per_second,
        "cost_per_million_tokens": million_cost(plan.question, c.tokens_per_second),
        "exposed_all_to_all_share": c.step.exposed_exchange_share,
        "worst_input_grade": plan.worst_grade,
    }


def _memory(memory: StageMemory) -> dict[str, object]:
    return {
        "stage": memory.stage, **memory.lines, "allocated": memory.allocated,
        "reserved": memory.reserved, "total": memory.total,
    }


def input_names(names: tuple[str, ...], most: int = 4) -> str:
    """Names of a cluster's numbers in words, the first of them."""
    shown = ", ".join(name.replace("_", " ") for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def coverage(plan: Plan) -> Coverage | None:
    """Shares of time and bytes by how they were found.

    Products count as measured where the cluster has a table of them, all else as rooflines.
    """
    if not plan.stages:
        return None
    worst = max(plan.stages, key=lambda memory: memory.total)
    counted = ("base_weights", "adapters", "gradients", "moments", "masters")
    exact = sum(worst.lines[name] for name in counted) / worst.total
    cluster, measured = plan.question.cluster, 0.0
    if plan.best is not None:
        tables = {"gemm": cluster.gemm_by_rows, "grouped": cluster.grouped_by_rows}
        parts = plan.best.step.parts
        measured = sum(parts.get(name, 0.0) for name, table in tables.items() if table)
        measured /= plan.best.step.seconds
    return {
        "time_from_measured": measured, "time_from_roofline": 1 - measured,
        "bytes_from_inventory": exact, "bytes_from_formulas": 1 - exact,
    }


def parallel_section(candidate: Candidate) -> dict[str, object]:
    """The `parallel:` section of a recipe for a layout."""
    degrees = candidate.layout.degrees
    section: dict[str, object] = {
        "ep": degrees.ep, "dp_shard": degrees.dp_shard, "dp_replicate": degrees.dp_replicate,
        "tp": degrees.tp, "pp": degrees.pp, "cp": degrees.cp,
        "dispatcher": candidate.layout.dispatcher if degrees.ep > 1 else "auto",
        "capacity_factor": candidate.job.capacity_factor,
    }
    if degrees.pp > 1:
        section["stages"] = [stage.num_layers for stage in candidate.layout.stages]
    return section


def parallel_yaml(candidate: Candidate) -> str:
    """The section as YAML text."""
    text: str = yaml.safe_dump({"parallel": parallel_section(candidate)}, sort_keys=False)
    return text


def why_dispatcher(plan: Plan) -> str:
    """Why the chosen dispatcher, in one sentence; empty without experts on several ranks."""
    best = plan.best
    if best is None or not best.exchanges:
        return ""
    degrees, times = best.layout.degrees, best.exchanges
    ordered = sorted(times, key=lambda name: times[name])
    shown = ", ".join(f"{name} {times[name] * 1e3:.2f} ms" for name in ordered)
    copies = _copies(plan, degrees)
    return f"{best.layout.dispatcher} for experts on {degrees.ep} ranks: {shown} a layer{copies}"


def _copies(plan: Plan, degrees: Degrees) -> str:
    moes = [x.ffn for x in plan.question.outline.layers if hasattr(x.ffn, "top_k")]
    ffn = moes[0]
    experts, chosen = getattr(ffn, "num_experts", 0), getattr(ffn, "top_k", 0)
    distinct = distinct_groups(experts, chosen, degrees.ep)
    return f"; a token's {chosen} experts stand on {distinct:.1f} of {degrees.ep} ranks"


def time_lines(plan: Plan) -> list[tuple[str, float]]:
    """What the step goes into, in words, with shares, the largest first."""
    return limits_in_order(plan.best.step) if plan.best else []
