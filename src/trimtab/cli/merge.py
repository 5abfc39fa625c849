"""`trimtab merge`: fold an adapter into its base and check that nothing else changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimtab.cli.report import byte_progress, print_verdicts

if TYPE_CHECKING:
    from trimtab.verify.merged import MergeReport

app = typer.Typer(add_completion=False)


@app.command()
def merge(
    base: Annotated[str, typer.Argument(help="checkpoint the adapter was trained on")],
    adapter: Annotated[str, typer.Argument(help="adapter directory")],
    out: Annotated[str, typer.Option(help="new directory")],
    dtype: Annotated[
        Literal["native", "bf16", "fp32"],
        typer.Option(help="of the written weights; native quantises changed matrices again"),
    ] = "native",
    check: Annotated[bool, typer.Option(help="compare logits afterwards; loads both models")] = True,
    prompts: Annotated[
        str | None, typer.Option(help="texts to compare logits on, a line each, or token ids as JSON")
    ] = None,
    max_logits_error: Annotated[
        float | None, typer.Option(help="limit of a token's relative error; by default that of the dtype")
    ] = None,
    max_lost: Annotated[
        float, typer.Option(help="share of the adapter's change that quantising again may lose")
    ] = 0.5,
    accept_base: Annotated[
        str | None, typer.Option(help="fingerprint of a base the adapter was not trained on")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write base + adapter in the released format, then compare its logits with base and adapter.

    Tensors that the adapter does not change are copied byte for byte, which their hashes prove. A
    merge that fails a check is marked unfinished, so that no other command reads it.
    """
    from trimtab.verify.merged import MergeChecks, merge_checked, read_prompts

    checks = MergeChecks(
        check, None if prompts is None else read_prompts(prompts, base), max_logits_error, max_lost
    )
    with byte_progress("merging") as progress:
        report = merge_checked(base, adapter, out, dtype=dtype, checks=checks,
                               accept_base=accept_base, progress=progress)
    copied = report.copied
    print_verdicts(
        report.verdicts, as_json, lines=_lines(report), out=out, targets=report.num_targets,
        dtype=dtype, changed=copied.tensors.changed, identical=copied.tensors.identical,
        cloned_bytes=copied.tensors.cloned_bytes,
        errors=[error.as_dict() for error in copied.errors],
        next_command=f"trimtab generate {out} --prompt TEXT",
    )


def _lines(report: MergeReport) -> list[str]:
    """What was written, for people: counts, then the error of each kind of matrix."""
    from trimtab.units import format_bytes

    tensors = report.copied.tensors
    shared = f", {format_bytes(tensors.cloned_bytes)} shared" if tensors.cloned_bytes else ""
    lines = [f"{tensors.changed:,} tensors changed, {tensors.identical:,} identical{shared}"]
    lines += [
        f"{error.kind} ({error.form}, {error.count:,}): relative RMS {error.relative_rms:.2g}, "
        f"largest {error.largest:.2g}, {error.share_of_change:.1%} of the change lost"
        for error in report.copied.errors
    ]
    if lines[1:] and not all(verdict.passed for verdict in report.verdicts):
        lines.append("quantising again loses too much: --dtype bf16 keeps the change; --max-logits-error "
                     "and --max-lost accept the loss")
    return lines
