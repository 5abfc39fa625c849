"""`trimtab verify`: checks of a checkpoint's structure, files and numbers."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trimtab.cli.report import byte_progress, print_json, print_next, print_verdicts

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check a checkpoint.")

_Json = Annotated[bool, typer.Option("--json", help="one JSON object")]


@app.command()
def structure(
    model: Annotated[str, typer.Argument(help="directory, file or URL of a checkpoint")],
    as_json: _Json = False,
) -> None:
    """Hold every tensor's name, shape and dtype against config.json; only headers are read."""
    from trimtab.verify.structure import check_structure

    report = check_structure(model)
    print_verdicts(
        report.verdicts, as_json, lines=report.lines, num_tensors=report.num_tensors,
        differences=[difference.as_dict() for difference in report.differences],
        next_command=f"trimtab verify files {model}",
    )


@app.command()
def files(
    directory: Annotated[str, typer.Argument(help="a directory that Trimtab wrote")],
    as_json: _Json = False,
) -> None:
    """Hold the size and hash of every file against manifest.json."""
    from trimtab.checkpoint.manifest import verify_files

    print_verdicts(verify_files(directory), as_json)


@app.command()
def dump(
    model: Annotated[str, typer.Argument(help="directory or URL of a checkpoint")],
    input_ids: Annotated[str, typer.Option(help='file {"sequences": [[ids...], ...]}')],
    out: Annotated[str, typer.Option(help="new directory")],
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16"], typer.Option(help="compute dtype")
    ] = "float32",
    as_json: _Json = False,
) -> None:
    """Write logits, losses and hidden states of given tokens to OUT/tensors.safetensors."""
    from trimtab.verify.dump import read_sequences, write_dump

    sequences = read_sequences(input_ids)
    with byte_progress("loading") as progress:
        count = write_dump(model, sequences, out, dtype, where=input_ids, progress=progress)
    if as_json:
        print_json({"out": out, "tensors": count, "sequences": len(sequences), "dtype": dtype})
    else:
        typer.echo(f"{count} tensors of {len(sequences)} sequences written to {out}")
        print_next(f"trimtab verify compare {out} OTHER_DUMP")


@app.command()
def compare(
    found: Annotated[str, typer.Argument(help="a dump")],
    reference: Annotated[str, typer.Argument(help="the dump it must equal")],
    limit: Annotated[
        float | None, typer.Option(help="largest relative error; by default by dtype")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare two dumps tensor by tensor: max|a - b| / max|b|."""
    from trimtab.verify.dump import compare_dumps

    print_verdicts(compare_dumps(found, reference, limit), as_json)
