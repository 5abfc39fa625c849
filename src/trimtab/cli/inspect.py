"""`trimtab inspect`: what a model is, from its config alone or with its headers."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from trimtab.arch.load import READERS, load_arch
from trimtab.arch.outline import Outline
from trimtab.arch.outline_summary import summarise_outline
from trimtab.arch.presets import preset_config, preset_names
from trimtab.arch.readers.planned import NAMES as PLANNED
from trimtab.arch.summary import Summary, summarise
from trimtab.cli.inspect_gguf import find_gguf, print_gguf
from trimtab.cli.main import available_verbs
from trimtab.cli.target import Target, resolve
from trimtab.errors import ConfigError
from trimtab.units import format_bytes, format_count

app = typer.Typer(add_completion=False)

# A random checkpoint above this size is no sensible next step.
_SMALL_BYTES = 2**30


@app.command()
def inspect(
    target: Annotated[
        str | None,
        typer.Argument(help="preset, config.json, directory, URL or hub id (owner/name)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    list_known: Annotated[bool, typer.Option("--list", help="presets and families")] = False,
) -> None:
    """Show size, memory, layers and oddities; compare weights, where present, with the inventory.

    Exits with 1 if a checkpoint's tensors differ from what its config.json says.
    """
    if list_known:
        _print_known(as_json)
        return
    if target is None:
        raise ConfigError(
            "TT108", "trimtab inspect", "needs a TARGET", hint="try `trimtab inspect --list`"
        )
    if (gguf := find_gguf(target)) is not None:
        print_gguf(gguf, as_json)
        return
    found = resolve(target)
    arch = found.arch
    summary = summarise_outline(arch) if isinstance(arch, Outline) else summarise(arch)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(found, summary)) + "\n")
    else:
        _print_page(found, summary)
    if found.weights is not None and found.weights.differences:
        raise typer.Exit(1)


def _as_dict(target: Target, summary: Summary) -> dict[str, Any]:
    weights = target.weights
    return {
        "target": target.where,
        "planned_only": isinstance(target.arch, Outline),
        **summary.as_dict(),
        "weights": None if weights is None else {
            "files": weights.files, "num_tensors": weights.num_tensors, "bytes": weights.num_bytes,
            "skipped_tensors": weights.skipped, "compared": weights.is_compared,
        },
        "differences": [] if weights is None else [dict(item) for item in weights.differences],
    }


def _print_page(target: Target, summary: Summary) -> None:
    from rich.console import Console  # --json needs no terminal

    from trimtab.cli.inspect_page import PAGE_WIDTH, render_page

    console = Console(highlight=False)
    console.width = min(console.width, PAGE_WIDTH)
    render_page(target, summary, _next_command(target, summary), console)


def _next_command(target: Target, summary: Summary) -> str:
    verbs = available_verbs()
    if isinstance(target.arch, Outline):
        return f"trimtab plan --model {target.where} --cluster h200 --devices 8"
    small = summary.stored_bytes <= _SMALL_BYTES
    if target.kind == "preset" and small and "init" in verbs:
        return f"trimtab init --preset {target.where} --out checkpoints/{target.where}"
    if target.weights is not None and "verify" in verbs:
        return f"trimtab verify structure {target.where}"
    if target.weights is not None:
        return f"trimtab inspect {target.where} --json"
    return "trimtab inspect DIR   (the same with the weights: every difference is named)"


def _print_known(as_json: bool) -> None:
    if as_json:
        known = {"presets": list(preset_names()), "families": list(READERS), "planned": list(PLANNED)}
        sys.stdout.write(json.dumps(known) + "\n")
        return
    width = max(len(name) for name in preset_names())
    sys.stdout.write("presets\n")
    for name in preset_names():
        summary = summarise(load_arch(preset_config(name), name))
        size = f"{format_count(summary.total_parameters):>6} parameters"
        stored = f"{format_bytes(summary.stored_bytes):>10}"
        sys.stdout.write(f"  {name:<{width}}  {size}  {stored}  {summary.name}\n")
    sys.stdout.write(f"\nfamilies (model_type in config.json)\n  {', '.join(READERS)}\n")
    sys.stdout.write(f"\nfamilies that are only planned\n  {', '.join(PLANNED)}\n")


