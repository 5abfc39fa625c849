"""The page that `trimtab plan` prints on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.plan.capacity import COLUMNS, capacity_rows
from trimtab.plan.memory import ALLOCATED, OUTSIDE, StageMemory
from trimtab.plan.planner import Plan
from trimtab.plan.question import Question
from trimtab.plan.report import (
    Extras,
    input_names,
    job_rows,
    million_cost,
    parallel_yaml,
    time_lines,
    why_dispatcher,
)
from trimtab.plan.search import Candidate, capacity
from trimtab.plan.serving_plan import COLUMNS as COLUMNS_OF_SERVING
from trimtab.plan.serving_plan import ServingPlan, layout_row
from trimtab.units import format_bytes, format_count, format_seconds

_LAYOUTS = 5
_LINES = 8


def render_plan(plan: Plan, extras: Extras, console: Console) -> None:
    """Print a plan.

    Args:
        plan: the plan.
        extras: what was asked for beside the layout.
        console: where to.
    """
    question = plan.question
    job = question.job
    console.print(Text(plan.headline, style="bold"))
    what = "LoRA" if job.method == "lora" else "full training"
    console.print(
        f"{question.outline.name} on {question.cluster.title}: {what}, base {job.base_dtype}, "
        f"{job.global_batch} x {job.seq_len:,} tokens per step"
    )
    if not question.outline.is_trained:
        console.print("this family is planned only; Trimtab does not train it", style="yellow")
    console.print(_grade(plan.worst_grade, plan.weak_inputs), style="dim")
    for note in extras.notes:
        console.print(f"not planned: {note}", style="yellow")
    console.print()
    if plan.best is None:
        _no_plan(plan, console)
        return
    console.print(_layouts(plan))
    console.print(Text.assemble(("limit  ", "dim"), plan.binding_limit))
    if reason := why_dispatcher(plan):
        console.print(Text.assemble(("dispatcher  ", "dim"), reason))
    _cost(question, plan.best.tokens_per_second, "trained on", console)
    console.print()
    console.print(_memory(plan.stages, capacity(question.cluster)))
    console.print(_time(plan))
    console.print(_bands(plan))
    if extras.capacities:
        console.print(_table(COLUMNS, capacity_rows(extras.capacities)))
    if extras.job is not None:
        console.print(_table(("the whole job", ""), job_rows(extras.job, datetime.now())))
    console.print()
    console.print(Text("for the recipe", style="dim"))
    console.print(parallel_yaml(plan.best), end="")


def _no_plan(plan: Plan, console: Console) -> None:
    console.print(Text("no feasible plan", style="bold red"))
    console.print(Text.assemble(("limit  ", "dim"), plan.binding_limit))
    if plan.stages:
        console.print()
        console.print(_memory(plan.stages, capacity(plan.question.cluster)))
    console.print(Text("what would help, the cheapest first", style="bold"))
    if not plan.changes:
        console.print("  nothing that was tried: more memory per device is needed")
    for change in plan.changes:
        console.print(f"  {change.text}: {format_bytes(change.memory)} per rank")


def _layouts(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("", "pp", "tp", "cp", "ep", "dp"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("base", "again", "dispatch"):
        table.add_column(title, no_wrap=True)
    for title in ("GiB", "step", "tok/s", "a2a"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = [plan.best, *plan.found.candidates[1:_LAYOUTS]]
    for number, c in enumerate(filter(None, shown), start=1):
        table.add_row(*_layout_row(number, c), style="bold" if number == 1 else "")
    return table


def _layout_row(number: int, c: Candidate) -> list[str]:
    d = c.layout.degrees
    return [
        str(number), *map(str, (d.pp, d.tp, d.cp, d.ep)), f"{d.dp_shard}x{d.dp_replicate}",
        "resident" if c.layout.resident else "sharded",
        "layer" if c.job.recompute.layers == "all" else "none",
        c.layout.dispatcher if d.ep > 1 else "-",
        f"{c.memory.total / 2**30:.1f}", format_seconds(c.step.seconds),
        format_count(c.tokens_per_second), f"{c.step.exposed_exchange_share:.1%}",
    ]


def _memory(stages: tuple[StageMemory, ...], limit: float) -> RenderableType:
    worst = max(stages, key=lambda memory: memory.total)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"memory of a rank of stage {worst.stage}")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for name in (*ALLOCATED, *OUTSIDE):
        size = worst.lines[name]
        if size >= 2**20:
            bar = "#" * round(size / limit * 40)
            table.add_row(name.replace("_", " "), format_bytes(size), Text(bar, style="green"))
    table.add_row(
        Text("total", style="bold"), Text(format_bytes(worst.total), style="bold"),
        f"of {format_bytes(limit)}",
    )
    return table


def _time(plan: Plan) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("time of a step goes into")
    table.add_column("share", justify="right")
    for words, share in time_lines(plan)[:_LINES]:
        table.add_row(words, f"{share:.1%}")
    return Group(Text(), table)


def _bands(plan: Plan) -> RenderableType:
    limit = capacity(plan.question.cluster)
    rows = [
        (band.name, f"{band.load:.2f} x mean",
         format_bytes(band.memory) + " over" * (band.memory > limit), format_seconds(band.step_seconds))
        for band in plan.bands
    ]
    return _table(("routing", "fullest rank", "memory", "step"), rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, title in enumerate(titles):
        # Columns of numbers have a title and stand on the right.
        table.add_column(title, justify="right" if index and title else "left", no_wrap=bool(title))
    for row in rows:
        table.add_row(*row)
    return Group(Text(), table)


def render_serving(plan: ServingPlan, console: Console) -> None:
    """Print a plan for serving."""
    question = plan.question
    console.print(Text(plan.headline, style="bold"))
    count = "1 adapter" if plan.adapters == 1 else f"{plan.adapters} adapters"
    console.print(
        f"{question.outline.name} served on {question.cluster.title}: base {question.job.base_dtype}, "
        f"{count}, requests of {question.job.seq_len:,} tokens"
    )
    console.print(_grade(plan.worst_grade, plan.weak_inputs), style="dim")
    console.print()
    console.print(Text.assemble(("limit  ", "dim"), plan.binding_limit))
    if not plan.layouts:
        console.print(Text("no feasible plan", style="bold red"))
        return
    console.print(_table(COLUMNS_OF_SERVING, [layout_row(x) for x in plan.layouts[:_LAYOUTS]]))
    console.print("adapters: as many as there is room for", style="dim")
    best, limit = plan.layouts[0], capacity(question.cluster)
    _cost(question, best.tokens_per_second, "written", console)
    rows = [(name.replace("_", " "), format_bytes(size)) for name, size in best.memory.items() if size]
    total = sum(best.memory.values())
    rows.append(("total", f"{format_bytes(total)} of {format_bytes(limit)}"))
    console.print(_table(("memory of a rank of the first", "bytes"), rows))
    shares = [(n, f"{s / best.decode_seconds:.1%}") for n, s in best.decode_parts.items() if s]
    console.print(_table(("time between two tokens goes into", "share"), shares))


def _cost(question: Question, tokens_per_second: float, done: str, console: Console) -> None:
    cost = million_cost(question, tokens_per_second)
    if cost is not None:
        words = f"{cost:.3g} {question.cluster.currency} per million tokens {done}"
        console.print(Text.assemble(("cost  ", "dim"), words))


def _grade(grade: str, weak: tuple[str, ...]) -> str:
    return f"worst input grade: {grade.replace('_', ' ')} ({input_names(weak)})"
