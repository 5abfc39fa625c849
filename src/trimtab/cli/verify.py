"""`trimtab verify`: checks of a checkpoint's structure, files and numbers."""

from __future__ import annotations

from pathlib import Path
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
    images: Annotated[
        str | None,
        typer.Option(help='file {"images": [[path or base64, ...] per sequence]}, or .safetensors '
                     "with patches.N and grids.N"),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write logits, losses and hidden states of given tokens to OUT/tensors.safetensors."""
    from trimtab.verify.dump import COMPUTE, read_sequences, write_dump

    sequences, batches = read_sequences(input_ids), None
    if images is not None:
        from trimtab.verify.images import images_for

        wide = COMPUTE["float64" if dtype == "float64" else "float32"]
        sequences, batches = images_for(model, images, sequences, wide)
    with byte_progress("loading") as progress:
        count = write_dump(model, sequences, out, dtype, images=batches, where=input_ids,
                           progress=progress)
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


@app.command()
def curve(
    model: Annotated[str, typer.Argument(help="directory or URL of a checkpoint")],
    adapter: Annotated[str, typer.Option(help="PEFT adapter directory to start from")],
    batches: Annotated[str, typer.Option(help='file {"batches": [[[ids...], ...], ...]}, one a step')],
    out: Annotated[str, typer.Option(help="new directory")],
    lr: Annotated[float, typer.Option(help="learning rate", min=0.0)] = 1e-3,
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16"], typer.Option(help="compute dtype")
    ] = "float32",
    accept_base: Annotated[
        str | None, typer.Option(help="fingerprint of a base the adapter was not trained on")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Train one plain AdamW step per batch; write OUT/losses.json and OUT/adapter."""
    from trimtab.verify.curve import loss_curve, read_batches

    read = read_batches(batches)
    with byte_progress("loading") as progress:
        losses = loss_curve(model, adapter, read, out, lr=lr, dtype=dtype, where=batches,
                            accept_base=accept_base, progress=progress)
    if as_json:
        print_json({"out": out, "loss": losses, "lr": lr, "dtype": dtype})
    else:
        typer.echo(f"{len(losses)} steps, loss {losses[0]:.6f} -> {losses[-1]:.6f}, written to {out}")
        print_next(f"trimtab generate {model} --adapter {out}/adapter --interactive")


@app.command()
def drill(
    recipe: Annotated[Path, typer.Argument(help="recipe file (YAML)")],
    out: Annotated[Path, typer.Option(help="new directory for the two runs")],
    kills: Annotated[int, typer.Option(help="how often the run is killed", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="of the moments and signals")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a recipe value")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Kill a run again and again; its adapter must equal that of an undisturbed run."""
    from trimtab.verify.drill import run_drill

    report = run_drill(recipe, out, kills=kills, seed=seed, overrides=overrides or (),
                       say=lambda text: typer.echo(text, err=True))
    hit = ", ".join(f"{count} x {kind}" for kind, count in sorted(report.kills.items()))
    print_verdicts(list(report.verdicts), as_json, kills=report.kills, starts=report.starts,
                   lines=[f"{hit or 'no kill'} in {report.starts} starts"],
                   next_command=f"trimtab finetune {recipe}")
