"""`trimtab merge`: fold an adapter into its base and check that nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.cli.report import byte_progress, print_verdicts

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
    from trimtab.checkpoint.adapter import load_adapter
    from trimtab.checkpoint.manifest import check_output, mark_unfinished
    from trimtab.checkpoint.merge import copy_checkpoint
    from trimtab.checkpoint.source import open_source
    from trimtab.verify.merged import check_merge

    check_output(out)
    source = open_source(base)
    read = load_adapter(adapter, load_arch(source.config(), source.where))
    with byte_progress("merging") as progress:
        copy_checkpoint(
            source, out, adapter=read, dtype=dtype, extra={"made_by": "merge"}, progress=progress
        )
    verdicts = check_merge(base, read, out) if check else []
    if not all(verdict.passed for verdict in verdicts):
        mark_unfinished(Path(out))
    print_verdicts(
        verdicts, as_json, out=out, targets=len(read.targets), dtype=dtype,
        next_command=f"trimtab generate {out} --prompt TEXT",
    )
