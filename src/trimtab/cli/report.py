"""What verbs print: verdicts on stdout, progress on stderr.

Knows: tables, JSON, progress bars. Does not know: what is checked or written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from trimtab.errors import ConfigError
from trimtab.units import parse_bytes
from trimtab.verdict import Verdict

_MAX_ROWS = 40


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes on stderr; gives the callback `(done, total)` that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield move


@contextmanager
def file_progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr with bytes, rate, time left and the current file."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    # The name of the file gives way when the terminal is narrow, figures do not.
    whole, rest = Column(no_wrap=True), Column(no_wrap=True, ratio=1, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", table_column=whole), BarColumn(12, table_column=whole),
        DownloadColumn(binary_units=True, table_column=whole),
        TransferSpeedColumn(table_column=whole), TimeRemainingColumn(table_column=whole),
        TextColumn("{task.fields[file]}", table_column=rest),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(label, total=None, file="")

        def move(file: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, file=file)

        yield move


def parse_memory(text: str) -> int:
    """The bytes that `--memory` allows.

    Raises:
        ConfigError: TT108 if the text is no number of bytes.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError("TT108", "--memory", str(error), hint="such as 256MiB") from error


def print_json(value: object) -> None:
    """One JSON object on stdout; NaN and infinity become strings."""
    sys.stdout.write(json.dumps(_finite(value), indent=1) + "\n")


def print_note(note: str | None) -> None:
    """A remark on stderr, if there is one."""
    if note is not None:
        typer.echo(f"note: {note}", err=True)


def print_verdicts(
    verdicts: Sequence[Verdict],
    as_json: bool,
    *,
    lines: Sequence[str] = (),
    next_command: str | None = None,
    **facts: object,
) -> None:
    """Print verdicts and end with exit code 1 if one failed.

    Args:
        verdicts: failed ones are shown first, at most 40 in the human form.
        as_json: print one object with `passed`, `verdicts` and `facts` instead.
        lines: details in words.
        next_command: what to type next if all passed.
        facts: further members of the JSON object.

    Raises:
        typer.Exit: with code 1 if a verdict failed.
    """
    passed = all(verdict.passed for verdict in verdicts)
    if as_json:
        found = [verdict.as_dict() for verdict in verdicts]
        print_json({"passed": passed, "verdicts": found, **facts})
    else:
        ordered = sorted(verdicts, key=lambda verdict: verdict.passed)
        out = [str(verdict) for verdict in ordered[:_MAX_ROWS]]
        if len(ordered) > _MAX_ROWS:
            out.append(f"      ... and {len(ordered) - _MAX_ROWS} more, see --json")
        out.extend(f"  {line}" for line in lines[:_MAX_ROWS])
        failed = sum(not verdict.passed for verdict in verdicts)
        out.append(f"{len(verdicts) - failed} of {len(verdicts)} checks passed")
        sys.stdout.write("\n".join(out) + "\n")
        if passed and next_command is not None:
            print_next(next_command)
    if not passed:
        raise typer.Exit(1)


def print_next(command: str) -> None:
    """Name the command that usually follows."""
    sys.stdout.write(f"\nnext: {command}\n")


def _finite(value: object) -> object:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
