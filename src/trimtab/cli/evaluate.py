"""`trimtab evaluate RECIPE`: base against adapter on held-out sets, and the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.evaluate.compare import Interval
    from trimtab.evaluate.report import EvalReport

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    recipe: Annotated[Path, typer.Argument(help="recipe file (YAML)")],
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="PEFT directory; default: the recipe's own")
    ] = None,
    accept_base: Annotated[
        str | None, typer.Option(help="fingerprint of a base the adapter was not trained on")
    ] = None,
    base_only: Annotated[bool, typer.Option("--base-only", help="score the base alone")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a recipe value")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="also write the JSON here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Score held-out sets with the base and with the adapter; exit 1 if the gate fails."""
    from trimtab.config.load import load_recipe
    from trimtab.errors import ConfigError

    loaded = load_recipe(recipe, overrides or ())
    chosen = None if base_only else adapter or Path(loaded.output) / "adapter"
    if chosen is not None and not chosen.is_dir():
        raise ConfigError("TT107", "--adapter", "no such directory", value=chosen,
                          hint=f"run `trimtab finetune {recipe}` first, or pass --base-only")
    from trimtab.evaluate.run import evaluate as run

    report = run(loaded, chosen, accept_base=accept_base)
    text = json.dumps(report.as_dict())
    if out is not None:
        from trimtab.checkpoint.manifest import write_atomic

        write_atomic(out, (text + "\n").encode())
    if as_json:
        typer.echo(text)
    else:
        _show(report)
    after = f" --adapter {chosen} --compare" if chosen is not None else ""
    typer.echo(f"next: trimtab generate {loaded.model.path}{after} --interactive", err=True)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: EvalReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    grid = Table(box=None, pad_edge=False)
    for name in ("set", "metric"):
        grid.add_column(name, overflow="fold")
    for name in ("records", "base", "adapter", "difference, 95%"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in report.sets:
        after = "-" if row.after is None else f"{row.after.value:.4f}"
        grid.add_row(row.name, row.metric.replace("_", " "), str(row.num_records),
                     f"{row.before.value:.4f}", after, _difference(row.difference))
    console.print(grid)
    for row in report.sets:
        for example in row.examples:
            after = "" if example.after is None else f" | adapter: {example.after!r}"
            console.print(
                f"{example.prompt!r} -> expected {example.expected!r} | base: {example.before!r}"
                f"{after}", markup=False, soft_wrap=True,
            )
    for verdict in report.verdicts:
        console.print(str(verdict), markup=False, soft_wrap=True)


def _difference(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.value:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
