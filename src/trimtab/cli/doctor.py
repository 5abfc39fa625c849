"""`trimtab doctor`: causes and next actions for what is seen on this machine or in a run."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimtab.cli.report import print_json
from trimtab.errors import ConfigError
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.doctor.ops import OperatorReport

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Find out why.")


@app.callback()
def doctor() -> None:
    """Find out why something is slow, wrong or missing."""


@app.command()
def ops(
    device: Annotated[
        str | None, typer.Option(help="device type; the machine's accelerator or cpu by default")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"] | None, typer.Option(help="of activations")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="a size in place of the typical one, such as T=65536")
    ] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="as `ops:` of a recipe, such as kda=reference")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Which implementation of each operator runs here, and why the faster ones do not."""
    sizes = {key: _positive(key, text) for key, text in _pairs("--size", size)}
    overrides = dict(_pairs("--force", force))
    import torch

    from trimtab.doctor.ops import report_ops

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = "float32" if device == "cpu" else "bfloat16"
    reports = report_ops(device, getattr(torch, dtype), overrides, sizes)
    if as_json:
        print_json({"operators": [report.as_dict() for report in reports]})
        return
    sys.stdout.write("\n".join(_lines(device, dtype, reports)) + "\n")


def _lines(device: str, dtype: str, reports: list[OperatorReport]) -> list[str]:
    lines = [f"operators on {device}, {dtype}"]
    for report in reports:
        shapes = " ".join(f"{key}={size}" for key, size in report.case.shapes.items())
        space = "" if report.workspace_bytes is None else (
            f", workspace {format_bytes(report.workspace_bytes)}"
        )
        lines += ["", f"{report.name}  ({shapes}{space})"]
        for choice in report.choices:
            mark = "runs" if choice.chosen else "-"
            why = choice.reason or ("" if choice.chosen else "slower than the one that runs")
            lines.append(f"  {mark:<5}{choice.name:<12}{why}".rstrip())
    return lines


def _pairs(flag: str, words: list[str] | None) -> list[tuple[str, str]]:
    found = []
    for word in words or []:
        match = re.fullmatch(r"(\w+)=(\w+)", word)
        if match is None:
            raise ConfigError("TT108", f"trimtab doctor ops {flag}", "must be NAME=VALUE", value=word)
        found.append((match[1], match[2]))
    return found


def _positive(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("TT108", f"trimtab doctor ops --size {key}", "must be a whole number, 1 or more",
                          value=text)
    return int(text)
