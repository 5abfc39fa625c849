"""`trimtab export`: write a checkpoint or an adapter in the form another tool reads."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trimtab.cli.report import byte_progress, print_json, print_next

app = typer.Typer(add_completion=False)


@app.command()
def export(
    src: Annotated[str, typer.Argument(help="checkpoint (hf) or adapter directory (peft)")],
    to: Annotated[Literal["hf", "peft"], typer.Option(help="form to write")],
    out: Annotated[str, typer.Option(help="new directory")],
    base: Annotated[
        str | None, typer.Option(help="base of an adapter; by default what the adapter names")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write a checked copy: `hf` a checkpoint in the released format, `peft` an adapter."""
    count = _export_checkpoint(src, out) if to == "hf" else _export_adapter(src, out, base)
    if as_json:
        print_json({"out": out, "to": to, "tensors": count})
    else:
        typer.echo(f"{count} tensors written to {out}")
        print_next(f"trimtab verify files {out}")


def _export_checkpoint(src: str, out: str) -> int:
    from trimtab.checkpoint.merge import copy_checkpoint
    from trimtab.checkpoint.source import open_source

    source = open_source(src)
    with byte_progress("exporting") as progress:
        copy_checkpoint(source, out, extra={"made_by": "export"}, progress=progress)
    return len(source.entries())


def _export_adapter(src: str, out: str, base: str | None) -> int:
    from trimtab.arch.load import load_arch
    from trimtab.checkpoint.adapter import AdapterMeta, adapter_base, load_adapter, save_adapter
    from trimtab.checkpoint.source import open_source

    base = base or adapter_base(src)
    source = open_source(base)
    arch = load_arch(source.config(), source.where)
    adapter = load_adapter(src, arch)
    fingerprint = adapter.manifest.source_fingerprint if adapter.manifest else None
    meta = AdapterMeta(base, fingerprint, {"made_by": "export"})
    save_adapter(out, arch, adapter.targets, adapter.tensors, meta)
    return len(adapter.tensors)
