"""`trimtab demo`: the whole job on a tiny model, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.report import print_json

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="directory of the demo")] = Path("runs/demo"),
    base: Annotated[
        Path | None, typer.Option(hidden=True, help="another base checkpoint, for development")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Inspect, verify, fine-tune, evaluate, merge and export a tiny model; write report.html.

    Each command is printed as it would be typed. An interrupted demo continues where it was.
    Exits with 1 if a check fails.
    """
    from rich.console import Console

    from trimtab.demo.run import run_demo

    outcome = run_demo(out, console=Console(stderr=as_json, highlight=False), base=base)
    if as_json:
        print_json(outcome.as_dict())
    if not outcome.passed:
        raise typer.Exit(1)
