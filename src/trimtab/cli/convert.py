"""`trimtab convert`: write a checkpoint so that each rank reads its part front to back."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimtab.cli.report import (
    file_progress,
    parse_memory,
    print_json,
    print_next,
    print_note,
    print_verdicts,
)
from trimtab.errors import ConfigError
from trimtab.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trimtab.arch.spec import ArchSpec
    from trimtab.checkpoint.convert import Plan, Report
    from trimtab.checkpoint.layout import Layout
    from trimtab.checkpoint.source import Source

app = typer.Typer(add_completion=False)

_PROBE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Host:
    """What one of several hosts would write."""

    part: str
    files: int
    bytes: int
    seconds: float


@app.command()
def convert(
    src: Annotated[str, typer.Argument(help="checkpoint: directory, URL or hub id")],
    out: Annotated[str, typer.Option(help="new directory or URL; an unfinished one goes on")],
    ep: Annotated[int | None, typer.Option(min=1, help="ranks that share the experts")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="pipeline stages")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="ranks that share a matrix")] = None,
    layout: Annotated[
        Literal["ranks", "logical"],
        typer.Option(help="files by owner, or whole tensors in a file per layer"),
    ] = "ranks",
    plan: Annotated[str | None, typer.Option(help="file with a `parallel:` section")] = None,
    recipe: Annotated[str | None, typer.Option(help="recipe whose `parallel:` counts")] = None,
    base_dtype: Annotated[
        Literal["native", "bf16", "fp32"], typer.Option(help="native keeps the released form")
    ] = "native",
    memory: Annotated[str, typer.Option(help="most memory of the process")] = "256MiB",
    workers: Annotated[int, typer.Option(min=1, help="threads that read")] = 4,
    part: Annotated[str, typer.Option(help="i/N: this host's share of the files")] = "1/1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be written")] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="read the result again and compare every tensor")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Stream a checkpoint into the layout of a cluster, in bounded memory.

    A conversion that was interrupted goes on when the same command is run again.
    """
    from trimtab.arch.load import load_arch
    from trimtab.checkpoint.convert import plan_conversion, write_plan
    from trimtab.checkpoint.output import open_output
    from trimtab.checkpoint.source import open_source
    from trimtab.checkpoint.structure import skipped_note

    limit, share = parse_memory(memory), _part(part)
    source = open_source(src)
    arch = load_arch(source.config(), source.where)
    wanted = _layout(arch, (ep, pp, tp), layout, plan, recipe)
    planned = plan_conversion(source, wanted, base_dtype)
    output = open_output(out)
    if base_dtype != "native":
        print_note(skipped_note(arch, source.entries()))
    if dry_run:
        _print_dry_run(planned, source, out, output.free(), share[1], as_json)
        return
    with file_progress("converting") as progress:
        report = write_plan(planned, output, memory=limit, workers=workers, part=share, progress=progress)
    if audit and report.finished:
        _audit(source, out, report, as_json)
        return
    _print_report(report, out, as_json)


def _audit(source: Source, out: str, report: Report, as_json: bool) -> None:
    from trimtab.checkpoint.audit import audit_conversion

    with file_progress("auditing") as progress:
        verdicts = audit_conversion(source, out, progress)
    print_verdicts(verdicts, as_json, next_command=f"trimtab verify files {out}", out=out,
                   conversion=_facts(report))


def _print_report(report: Report, out: str, as_json: bool) -> None:
    if as_json:
        print_json({"out": out, **_facts(report)})
        return
    rate = f", {format_bytes(report.written / report.seconds)}/s" if report.seconds else ""
    resumed = f", {format_bytes(report.resumed)} were there" if report.resumed else ""
    text = f"{report.files} files, {format_bytes(report.written)} written to {out} in "
    typer.echo(f"{text}{format_seconds(report.seconds)}{rate}{resumed}")
    if report.finished:
        print_next(f"trimtab verify files {out}")
    else:
        typer.echo("other parts are not finished; the last one writes the manifest")


def _facts(report: Report) -> dict[str, object]:
    rate = report.written / report.seconds if report.seconds else None
    return {**asdict(report), "bytes_per_second": rate}


def _print_dry_run(
    plan: Plan, source: Source, out: str, free: int | None, parts: int, as_json: bool
) -> None:
    rate = _read_rate(source)
    hosts = []
    for number in range(1, parts + 1):
        files = plan.part(number, parts)
        size = sum(file.size for file in files)
        hosts.append(_Host(f"{number}/{parts}", len(files), size, size / rate))
    if as_json:
        print_json({"out": out, "bytes": plan.num_bytes, "free_bytes": free,
                    "read_bytes_per_second": rate, "hosts": [asdict(host) for host in hosts],
                    "files": {file.name: file.size for file in plan.files}})
        return
    room = "unknown" if free is None else format_bytes(free)
    typer.echo(f"{len(plan.files)} files, {format_bytes(plan.num_bytes)}; free at {out}: {room}")
    for host in hosts:
        typer.echo(
            f"  part {host.part}: {host.files} files, {format_bytes(host.bytes)}, at least "
            f"{format_seconds(host.seconds)} at the {format_bytes(rate)}/s of the source"
        )


def _read_rate(source: Source) -> float:
    """Bytes per second of the source, measured on the beginning of its largest tensor."""
    name, entry = max(source.entries().items(), key=lambda item: item[1].num_bytes)
    buffer = memoryview(bytearray(min(_PROBE_BYTES, entry.num_bytes)))
    begun = time.perf_counter()
    source.read_into(name, 0, buffer)
    return len(buffer) / max(1e-9, time.perf_counter() - begun)


def _layout(
    arch: ArchSpec, flags: tuple[int | None, int | None, int | None], kind: str, plan: str | None,
    recipe: str | None,
) -> Layout:
    from itertools import accumulate, pairwise

    from trimtab.checkpoint.layout import Degrees, logical_layout, rank_layout
    from trimtab.config.parallel import ParallelDegrees, read_degrees

    document = plan or recipe
    if plan and recipe:
        raise ConfigError("TT105", "--plan, --recipe", "only one of them can say the layout")
    if kind == "logical":
        if document or any(flag is not None for flag in flags):
            raise ConfigError("TT105", "--layout logical", "has no degrees",
                              hint="leave out --ep, --pp, --tp, --plan and --recipe")
        return logical_layout(arch)
    said = read_degrees(document) if document else ParallelDegrees()
    ep, pp, tp = (flag or known for flag, known in zip(flags, (said.ep, said.pp, said.tp), strict=True))
    stages = None
    if said.stages is not None and pp == said.pp:
        stages = list(pairwise(accumulate(said.stages, initial=0)))
    return rank_layout(arch, Degrees(ep, pp, tp), stages)


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ConfigError("TT108", "--part", "must be i/N with 1 <= i <= N", value=text)
    return int(number), int(count)
