"""`trimtab plan`: memory, time and layout of a job before the cluster is rented."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from trimtab.arch.outline import Outline
from trimtab.cli.target import resolve_outline
from trimtab.config.cluster import Cluster, load_cluster
from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError
from trimtab.plan.job import (
    DEFAULT_TARGETS,
    FULL_TRAINING,
    BaseDtype,
    Dispatcher,
    ExpertAdapters,
    Job,
    choose_adapters,
)
from trimtab.plan.planner import Plan, Question, make_plan
from trimtab.plan.report import parallel_yaml, plan_as_dict
from trimtab.plan.search import GOALS, Goal, Limits

app = typer.Typer(add_completion=False)

NO_PLAN = 3
_DEFAULT_STEP_TOKENS = 4 * 2**20


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help="preset, config.json, directory or hub id")] = None,
    cluster: Annotated[str | None, typer.Option(help="preset or cluster document")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="ranks; dies, where a package has two")] = None,
    packages: Annotated[int | None, typer.Option(min=1, help="in place of --devices")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="in place of --devices")] = None,
    recipe: Annotated[Path | None, typer.Option(help="take model, lengths and LoRA from a recipe")] = None,
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
    out: Annotated[Path | None, typer.Option(help="write the `parallel:` section to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Find the layout of a LoRA job, and say what it needs; exit 3 if nothing fits."""
    asked = _load_recipe(recipe)
    machine = load_cluster(_required(cluster, "--cluster", "h200"))
    named = model or (asked.model.path if asked else None)
    outline = resolve_outline(_required(named, "--model", "a directory with config.json"))
    limits = Limits(
        pp, tp, cp, ep, dp_shard,
        cast("Dispatcher | None", _one_of(dispatcher, get_args(Dispatcher), "--dispatcher")),
        cast("None", _one_of(recompute, ("layer", "none"), "--recompute")),
        _stages(stages, outline, pp),
    )
    ranks = _ranks(machine, devices, packages, hosts)
    length = seq_len or (asked.finetune.data.max_seq_len if asked else 8192)
    tokens = tokens_per_step or (
        asked.finetune.batch.tokens_per_step if asked else max(_DEFAULT_STEP_TOKENS, 8192 * ranks)
    )
    job = _job(outline, asked, method, base_dtype, rank, targets, experts)
    chosen = cast(Goal, _one_of(goal, GOALS, "--goal"))
    question = Question(outline, job, machine, ranks, chosen, limits, tokens).with_length(length)
    answer = make_plan(question)
    _show(answer, as_json)
    if answer.best is None:
        raise typer.Exit(NO_PLAN)
    if out is not None:
        out.write_text(parallel_yaml(answer.best), encoding="utf-8")


def _load_recipe(path: Path | None) -> Recipe | None:
    if path is None:
        return None
    from trimtab.config.load import load_recipe  # only with a recipe

    return load_recipe(path, check_paths=False)


def _required(value: str | None, flag: str, example: str) -> str:
    if value is None:
        raise ConfigError("TT108", f"trimtab plan {flag}", "is required", hint=f"such as {example}")
    return value


def _one_of(value: str | None, allowed: tuple[str, ...], flag: str) -> str | None:
    if value is not None and value not in allowed:
        raise ConfigError("TT108", flag, f"must be one of {', '.join(allowed)}", value=value)
    return value


def _ranks(machine: Cluster, devices: int | None, packages: int | None, hosts: int | None) -> int:
    given = [n for n in (devices, packages, hosts) if n is not None]
    if len(given) != 1:
        raise ConfigError(
            "TT108", "trimtab plan", "needs one of --devices, --packages and --hosts",
            hint=f"a host of {machine.name} has {machine.ranks_per_host} ranks",
        )
    if devices is not None:
        return devices
    per = machine.ranks_per_package if packages is not None else machine.ranks_per_host
    return given[0] * per


def _stages(text: str | None, outline: Outline, pp: int | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    counts = tuple(int(part) for part in parts if part.strip().isdigit())
    if len(counts) != len(parts) or sum(counts) != outline.num_layers or pp != len(counts):
        raise ConfigError(
            "TT108", "--stages",
            f"must be {pp or '--pp'} numbers that add to {outline.num_layers} layers", value=text,
        )
    return counts


def _job(
    outline: Outline, recipe: Recipe | None, method: str, base_dtype: str | None, rank: int | None,
    targets: str | None, experts: str | None,
) -> Job:
    _one_of(method, ("lora", "full"), "--method")
    _one_of(base_dtype, get_args(BaseDtype), "--base-dtype")
    _one_of(experts, get_args(ExpertAdapters), "--experts")
    tune = recipe.finetune if recipe else None
    base = base_dtype or (tune.base_dtype if tune else "native")
    if method == "full":
        return Job(method="full", base_dtype=cast(BaseDtype, base), stack=FULL_TRAINING)
    words = tuple(targets.split(",")) if targets else (
        tune.lora.target_modules if tune else DEFAULT_TARGETS
    )
    form = experts or (tune.lora.experts if tune else "none")
    size = rank or (tune.lora.rank if tune else 32)
    adapters = choose_adapters(outline, size, words, cast(ExpertAdapters, form))
    return Job(base_dtype=cast(BaseDtype, base), adapters=adapters)


def _show(answer: Plan, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(plan_as_dict(answer)) + "\n")
        return
    from rich.console import Console  # --json needs no terminal

    from trimtab.cli.plan_page import render_plan

    render_plan(answer, Console(highlight=False))
