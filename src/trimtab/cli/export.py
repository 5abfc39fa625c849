"""`trimtab export`: write a checkpoint or an adapter in the form another tool reads."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trimtab.cli.report import byte_progress, print_json, print_next

app = typer.Typer(add_completion=False)


@app.command()
def export(
    src: Annotated[str, typer.Argument(help="checkpoint (hf) or adapter directory (the others)")],
    to: Annotated[
        Literal["hf", "peft", "vllm", "sglang", "vllm-ascend"], typer.Option(help="form to write")
    ],
    out: Annotated[str, typer.Option(help="new directory")],
    base: Annotated[
        str | None, typer.Option(help="base of an adapter; by default what the adapter names")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write a checked copy: `hf` a checkpoint in the released format, the others an adapter.

    `peft` joins the adapters of a layer's routed experts, as PEFT reads them for parameters; engines
    get one pair per expert's matrix, released names, and one rank and scaling throughout.
    """
    ignored: tuple[str, ...] = ()
    if to == "hf":
        count = _export_checkpoint(src, out)
    else:
        from trimtab.checkpoint.merge import export_adapter

        made = export_adapter(src, out, base, engine=None if to == "peft" else to)
        count, ignored = made.num_tensors, made.ignored
    if as_json:
        print_json({"out": out, "to": to, "tensors": count, "ignored": list(ignored)})
    else:
        typer.echo(f"{count} tensors written to {out}")
        for line in ignored:
            typer.echo(f"warning: {to} ignores the adapter on {line}; merging keeps it", err=True)
        print_next(f"trimtab verify files {out}")


def _export_checkpoint(src: str, out: str) -> int:
    from trimtab.checkpoint.merge import copy_checkpoint
    from trimtab.checkpoint.source import open_source

    with byte_progress("exporting") as progress:
        copied = copy_checkpoint(
            open_source(src), out, extra={"made_by": "export"}, progress=progress
        )
    return copied.tensors.changed + copied.tensors.identical
