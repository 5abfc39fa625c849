"""`trimtab plan`: memory, time and layout of a job before the cluster is rented."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.plan_question import Flags, ask, check_flags, recipe_of
from trimtab.config.recipe import Recipe
from trimtab.plan.capacity import CapacityRow, capacity_table, read_histogram
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.report import Extras, parallel_yaml, plan_as_dict
from trimtab.plan.search import GOALS
from trimtab.plan.serving_plan import plan_serving, serving_as_dict
from trimtab.plan.workload import left_out

app = typer.Typer(add_completion=False)

NO_PLAN = 3


@app.command()
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="take model, data and LoRA from a recipe")] = None,
    model: Annotated[str | None, typer.Option(help="preset, config.json, directory or hub id")] = None,
    cluster: Annotated[str | None, typer.Option(help="preset or cluster document")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="ranks; dies, where a package has two")] = None,
    packages: Annotated[int | None, typer.Option(min=1, help="in place of --devices")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="in place of --devices")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="tokens of a sequence [8192]")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(min=1, help="tokens between two steps")] = None,
    method: Annotated[str, typer.Option(help="lora or full")] = "lora",
    base_dtype: Annotated[str | None, typer.Option(help="native, bf16 or fp32 [native]")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="of the adapters [32]")] = None,
    targets: Annotated[str | None, typer.Option(help="target_modules, with commas [attention]")] = None,
    experts: Annotated[str | None, typer.Option(help="none, per_expert or shared_outer")] = None,
    goal: Annotated[str, typer.Option(help=", ".join(GOALS))] = "fastest",
    pp: Annotated[int | None, typer.Option(min=1, help="fix the pipeline degree")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="fix the tensor degree")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="fix the context degree")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="fix the expert degree")] = None,
    dp_shard: Annotated[int | None, typer.Option(min=1, help="fix the sharding degree")] = None,
    stages: Annotated[str | None, typer.Option(help="layers per stage, such as 12,12,12,9")] = None,
    dispatcher: Annotated[str | None, typer.Option(help="flat, all_gather or dedup")] = None,
    recompute: Annotated[str | None, typer.Option(help="layer or none; else both are tried")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="plan serving, not training")] = False,
    adapters: Annotated[int | None, typer.Option(min=0, help="served at once [1]")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="of a rank and hour")] = None,
    histogram: Annotated[Path | None, typer.Option(help="run directory: what capacity factors drop")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure this machine into --out")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value of the recipe")] = None,
    out: Annotated[Path | None, typer.Option(help="write the recipe, or its `parallel:` section")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Find the layout of a LoRA job, and say what it needs; exit 3 if nothing fits."""
    flags = Flags(**locals())
    check_flags(flags)
    if calibrate:
        from trimtab.cli.plan_calibrate import write_calibration  # torch, only to measure

        write_calibration(devices, out, as_json)
        return
    asked = recipe_of(flags)
    if serve:
        _serve(flags, asked)
        return
    answer = make_plan(ask(flags, asked))
    extras = _extras(flags, asked, answer)
    _show(answer, extras, as_json)
    if html is not None:
        from trimtab.plan.page import plan_page  # jinja2 only with a page

        _write(html, plan_page(answer, extras))
    if answer.best is None:
        raise typer.Exit(NO_PLAN)
    if out is not None:
        _write_section(out, flags, answer)


def _serve(flags: Flags, asked: Recipe | None) -> None:
    count = 1 if flags.adapters is None else flags.adapters
    answer = plan_serving(ask(flags, asked), count)
    if flags.as_json:
        sys.stdout.write(json.dumps(serving_as_dict(answer)) + "\n")
    else:
        from rich.console import Console  # --json needs no terminal

        from trimtab.cli.plan_page import render_serving

        render_serving(answer, Console(highlight=False))
    if not answer.layouts:
        raise typer.Exit(NO_PLAN)


def _extras(flags: Flags, asked: Recipe | None, answer: Plan) -> Extras:
    """What else was asked of a plan that has a layout."""
    if answer.best is None:
        return Extras()
    rows: tuple[CapacityRow, ...] = ()
    if flags.histogram is not None:
        rows = capacity_table(answer, read_histogram(flags.histogram, answer.question.outline))
    if asked is None:
        return Extras(capacities=rows)
    from trimtab.cli.plan_data import plan_job  # tokenizers only with a recipe

    job = plan_job(asked, answer)
    return Extras(job=job, capacities=rows, notes=left_out(asked))


def _write_section(out: Path, flags: Flags, answer: Plan) -> None:
    assert answer.best is not None, "there is a layout"
    text = parallel_yaml(answer.best)
    if flags.recipe is not None:
        from trimtab.config.rewrite import replace_section

        text = replace_section(flags.recipe.read_text(encoding="utf-8"), "parallel", text)
    _write(out, text)


def _write(path: Path, text: str) -> None:
    """Write a file so that the old one, which may be the recipe, is whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _show(answer: Plan, extras: Extras, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(plan_as_dict(answer, extras)) + "\n")
        return
    from rich.console import Console  # --json needs no terminal

    from trimtab.cli.plan_page import render_plan

    render_plan(answer, extras, Console(highlight=False))
