"""`trimtab finetune RECIPE`: train an adapter, or continue, and check it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trimtab.config.recipe import Recipe

app = typer.Typer(add_completion=False)


@app.command()
def finetune(
    recipe: Annotated[Path, typer.Argument(help="recipe file (YAML)")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a recipe value")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show targets and batch arithmetic, load no weights")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Train a LoRA adapter as RECIPE says; an interrupted run continues where it was."""
    from trimtab.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    if dry_run:
        _show_plan(loaded, as_json)
        return
    from trimtab.train.loop import finetune as run

    result = run(loaded)
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    elif result.stopped:
        typer.echo(f"{result.output}: stopped after {result.steps} steps, state saved")
    else:
        first = "" if result.first_loss is None else f"loss {result.first_loss:.4f} -> "
        last = "" if result.last_loss is None else f"{result.last_loss:.4f}, "
        typer.echo(
            f"{result.adapter}: {result.steps} steps, {first}{last}"
            f"{result.tokens_per_second:,.0f} tokens/s, peak {result.peak_memory_gib:.2f} GiB"
        )
    if result.stopped:
        typer.echo(f"next: trimtab finetune {recipe}{_repeat(overrides)}", err=True)
        return
    held_out = loaded.evaluate.domain or loaded.evaluate.general
    evaluate = f"trimtab evaluate {recipe}{_repeat(overrides)}"
    generate = f"trimtab generate {loaded.model.path} --adapter {result.adapter} --interactive"
    typer.echo(f"next: {evaluate if held_out else generate}", err=True)
    if not result.passed:
        raise typer.Exit(1)


def _show_plan(loaded: Recipe, as_json: bool) -> None:
    from rich.console import Console

    from trimtab.train.plan import plan_run
    from trimtab.train.reporter import ConsoleReporter

    plan = plan_run(loaded)
    if as_json:
        typer.echo(json.dumps(plan.as_dict()))
        return
    ConsoleReporter(Console(highlight=False)).plan(plan)
    length = f"{plan.steps} steps" if plan.steps else f"{loaded.finetune.epochs:g} epochs"
    typer.echo(f"length: {length}")
    typer.echo("next: the same command without --dry-run", err=True)


def _repeat(overrides: list[str] | None) -> str:
    """The same overrides, for the next command."""
    import shlex

    return "".join(f" --set {shlex.quote(item)}" for item in overrides or ())
