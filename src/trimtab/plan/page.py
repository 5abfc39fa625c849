"""A plan as one HTML file: memory by stage, the pipeline's time, all-to-all, layouts compared.

Knows: what is drawn. Does not know: geometry, files.
"""

from __future__ import annotations

from datetime import datetime

from trimtab.plan.capacity import COLUMNS, capacity_rows
from trimtab.plan.memory import ALLOCATED, OUTSIDE
from trimtab.plan.planner import Plan
from trimtab.plan.report import (
    Extras,
    coverage,
    input_names,
    job_rows,
    parallel_yaml,
    time_lines,
    why_dispatcher,
)
from trimtab.plan.search import Candidate, capacity
from trimtab.report.page import render
from trimtab.report.stacks import COLOURS, Span, Stack, stack_chart, timeline
from trimtab.units import format_bytes, format_count, format_seconds

_GIB = 2**30
_SHOWN_BATCHES = 24
_COLUMNS = ("", "pp", "tp", "cp", "ep", "shard x replicate", "base", "recompute", "dispatcher", "memory",
            "step", "tokens/s", "all-to-all")


def plan_page(plan: Plan, extras: Extras | None = None) -> str:
    """The page.

    Args:
        plan: what was found.
        extras: what was asked for beside the layout.
    """
    extras = extras or Extras()
    question = plan.question
    shares = coverage(plan)
    words = "" if shares is None else (
        f"Of the bytes {shares['bytes_from_inventory']:.0%} are sums over the inventory, the rest "
        f"formulas; of the time {shares['time_from_measured']:.0%} are measured products, the rest "
        "rooflines."
    )
    method = "LoRA" if question.job.method == "lora" else "Full training"
    context: dict[str, object] = {
        "model": question.outline.name, "cluster": question.cluster.title, "headline": plan.headline,
        "summary": f"{method}, base {question.job.base_dtype}, {question.job.global_batch} x "
                   f"{question.job.seq_len:,} tokens per step.",
        "grade": plan.worst_grade.replace("_", " "),
        "weak": input_names(plan.weak_inputs),
        "coverage": words, "limit": plan.binding_limit, "dispatcher": why_dispatcher(plan),
        "changes": [f"{c.text}: {format_bytes(c.memory)} per rank" for c in plan.changes],
        "notes": extras.notes, "tiles": [], "memory_chart": None, "time_chart": None, "legend": [],
        "capacities": capacity_rows(extras.capacities), "capacity_columns": COLUMNS,
        "job": job_rows(extras.job, datetime.now()) if extras.job is not None else None,
    }
    if plan.stages:
        context |= _memory(plan)
    if plan.best is not None:
        context |= _time(plan, plan.best)
    return render("trimtab.plan", "plan.html.j2", context)


def _memory(plan: Plan) -> dict[str, object]:
    present = [n for n in (*ALLOCATED, *OUTSIDE) if max(m.lines[n] for m in plan.stages) > 2**27]
    stacks = [
        Stack(f"stage {memory.stage}", [(n, memory.lines[n] / _GIB) for n in present],
              f"{memory.total / _GIB:.1f} GiB")
        for memory in plan.stages
    ]
    limit = capacity(plan.question.cluster) / _GIB
    chart = stack_chart("Memory of a rank of every stage, in GiB", stacks, present, limit=limit,
                        limit_text=f"limit {limit:.1f} GiB")
    legend = [(name.replace("_", " "), f"part{i % COLOURS}") for i, name in enumerate(present)]
    return {"memory_chart": chart, "legend": legend}


def _time(plan: Plan, best: Candidate) -> dict[str, object]:
    lines = [(words, share) for words, share in time_lines(plan) if share > 0.002]
    bars = [Stack(words, [("share", share)], f"{share:.1%}") for words, share in lines]
    shown = [c for c in (best, *plan.found.candidates[1:8]) if c is not None]
    steps = [
        Stack(f"layout {i}", [("seconds", c.step.seconds)], format_seconds(c.step.seconds))
        for i, c in enumerate(shown, 1)
    ]
    return {
        "tiles": [
            {"name": "a step", "value": format_seconds(best.step.seconds)},
            {"name": "tokens per second", "value": format_count(best.tokens_per_second)},
            {"name": "memory per rank", "value": format_bytes(best.memory.total)},
            {"name": "waits for all-to-all", "value": f"{best.step.exposed_exchange_share:.1%}"},
        ],
        "time_chart": stack_chart("Shares of a step", bars, ["share"], left=310),
        **_pipeline(best),
        "bands": [
            {"name": b.name, "load": f"{b.load:.2f} x mean", "memory": format_bytes(b.memory),
             "step": format_seconds(b.step_seconds)} for b in plan.bands
        ],
        "columns": _COLUMNS, "layouts": [_row(i, c) for i, c in enumerate(shown, 1)],
        "layouts_chart": stack_chart("Seconds of a step by layout", steps, ["seconds"]),
        "parallel": parallel_yaml(best),
    }


def _pipeline(best: Candidate) -> dict[str, object]:
    """The pipeline's first micro-batches; all of them would be too fine to see."""
    last = max((slot.batch for slot in best.step.slots), default=0)
    slots = [slot for slot in best.step.slots if slot.batch < _SHOWN_BATCHES]
    spans = [
        Span(s.stage, s.start, s.end, "part0" if s.is_forward else "part1",
             f"stage {s.stage}, micro-batch {s.batch}, {'forward' if s.is_forward else 'backward'}, "
             f"{s.end - s.start:.3g} s")
        for s in slots
    ]
    rows = [f"stage {stage.index}" for stage in best.layout.stages]
    title = f"Pipeline: the first {min(last + 1, _SHOWN_BATCHES)} of {last + 1} micro-batches"
    chart = timeline("Forward and backward passes of every stage", rows, spans, x_name="seconds")
    return {"timeline_title": title, "timeline_chart": chart}


def _row(number: int, c: Candidate) -> list[str]:
    d = c.layout.degrees
    return [
        str(number), *map(str, (d.pp, d.tp, d.cp, d.ep)), f"{d.dp_shard} x {d.dp_replicate}",
        "resident" if c.layout.resident else "sharded",
        "layer" if c.job.recompute.layers == "all" else "none",
        c.layout.dispatcher if d.ep > 1 else "none", format_bytes(c.memory.total),
        format_seconds(c.step.seconds), format_count(c.tokens_per_second),
        f"{c.step.exposed_exchange_share:.1%}",
    ]
