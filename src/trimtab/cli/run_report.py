"""`trimtab report RUN`: the page of a fine-tuning run, also while it is going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="run directory, the `output` of a recipe")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write RUN/report.html: losses, experts, drift, speed and memory, in one file."""
    from trimtab.train.report_page import write_report
    from trimtab.train.run_dir import RunDirectory

    path = write_report(RunDirectory(run))
    typer.echo(json.dumps({"report": str(path)}) if as_json else f"{path} written")
    typer.echo(f"next: open {path} in a browser", err=True)
