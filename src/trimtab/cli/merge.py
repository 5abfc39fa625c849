"""`trimtab merge`: fold an adapter into its base and check that nothing changed."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trimtab.cli.report import byte_progress, print_note, print_verdicts

app = typer.Typer(add_completion=False)


@app.command()
def merge(
    base: Annotated[str, typer.Argument(help="checkpoint the adapter was trained on")],
    adapter: Annotated[str, typer.Argument(help="adapter directory")],
    out: Annotated[str, typer.Option(help="new directory")],
    dtype: Annotated[
        Literal["native", "bf16", "fp32"], typer.Option(help="of the written weights")
    ] = "native",
    check: Annotated[bool, typer.Option(help="compare logits afterwards; loads both models")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write base + adapter in the released format, then compare its logits with base and adapter.

    A merge that fails the check is marked unfinished, so that no other command reads it.
    """
    from trimtab.arch.load import load_arch
    from trimtab.checkpoint.source import open_source
    from trimtab.checkpoint.structure import skipped_note
    from trimtab.verify.merged import merge_checked

    source = open_source(base)
    print_note(skipped_note(load_arch(source.config(), source.where), source.entries()))
    with byte_progress("merging") as progress:
        report = merge_checked(base, adapter, out, dtype=dtype, check=check, progress=progress)
    print_verdicts(
        report.verdicts, as_json, out=out, targets=report.num_targets, dtype=dtype,
        next_command=f"trimtab generate {out} --prompt TEXT",
    )
