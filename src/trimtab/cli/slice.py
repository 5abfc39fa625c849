"""`trimtab slice`: a small valid checkpoint of the real tensors of a large one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trimtab.cli.report import file_progress, parse_memory, print_json, print_next, print_note
from trimtab.errors import ConfigError
from trimtab.units import format_bytes

app = typer.Typer(add_completion=False)


@app.command("slice")
def slice_(
    model: Annotated[str, typer.Argument(help="checkpoint: directory, URL or hub id")],
    out: Annotated[str, typer.Option(help="new directory or URL; an unfinished one goes on")],
    layers: Annotated[str, typer.Option(help="layers to keep, such as 0-4 or 0-2,7")],
    experts: Annotated[int | None, typer.Option(min=1, help="experts to keep, all by default")] = None,
    vision: Annotated[bool, typer.Option(help="keep the vision tower, if there is one")] = True,
    memory: Annotated[str, typer.Option(help="most memory of the process")] = "256MiB",
    workers: Annotated[int, typer.Option(min=1, help="threads that read")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write some layers and experts in the released format, for drills and laptops.

    Only the bytes that are kept are read. Router rows follow the kept experts: the first ones of
    each routing group.
    """
    from trimtab.arch.load import load_arch
    from trimtab.checkpoint.convert import write_plan
    from trimtab.checkpoint.output import open_output
    from trimtab.checkpoint.slice import plan_slice
    from trimtab.checkpoint.source import open_source
    from trimtab.checkpoint.structure import skipped_note

    limit, numbers = parse_memory(memory), _layers(layers)
    source = open_source(model)
    print_note(skipped_note(load_arch(source.config(), source.where), source.entries()))
    plan = plan_slice(source, numbers, experts, vision=vision)
    with file_progress("slicing") as progress:
        report = write_plan(plan, open_output(out), memory=limit, workers=workers, progress=progress)
    if as_json:
        print_json({"out": out, "layers": numbers, "experts": experts, **asdict(report)})
        return
    tensors = sum(len(file.tensors) for file in plan.files)
    typer.echo(f"{tensors} tensors, {format_bytes(plan.num_bytes)} in {out}")
    print_next(f"trimtab verify structure {out}")


def _layers(text: str) -> list[int]:
    """Layer numbers in words.

    >>> _layers("0-2,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    for run in text.split(","):
        low, dash, high = run.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or int(high or low) < int(low):
            raise ConfigError("TT108", "--layers", "must be runs such as 0-4 or 0-2,7", value=text)
        found += range(int(low), int(high or low) + 1)
    return found
