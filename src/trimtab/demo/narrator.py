"""What the demo prints while it runs and at its end.

Knows: text, colours, tables. Does not know: what a step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.demo.outcome import Outcome, Step
from trimtab.demo.promises import Promise
from trimtab.train.reporter import ConsoleReporter
from trimtab.units import format_bytes, format_count, format_seconds
from trimtab.verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What one step has to say: lines, and checks."""

    lines: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()


@dataclass(slots=True)
class Narrator:
    """Runs steps one after the other and says so.

    Args:
        console: where the words go.
        total: number of steps to come.
        steps: those that have run.
    """

    console: Console
    total: int
    steps: list[Step] = field(default_factory=list)

    def say(self, text: str = "", style: str = "") -> None:
        """One line, never wrapped, so that a command can be copied."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def step(self, title: str, commands: Sequence[str], work: Callable[[], tuple[T, Found]]) -> T:
        """Print title and commands, do the work, print what it found, and keep it all."""
        self.say()
        self.say(f"[{len(self.steps) + 1}/{self.total}] {title}", "bold")
        for command in commands:
            self.say(f"  $ {command}", "cyan")
        started = time.perf_counter()
        value, found = work()
        seconds = time.perf_counter() - started
        for line in found.lines:
            self.say(f"  {line}")
        for verdict in found.verdicts:
            self.say(f"  {verdict}", "green" if verdict.passed else "bold red")
        self.say(f"  {format_seconds(seconds)}", "dim")
        done = Step(title, tuple(commands), tuple(found.lines), tuple(found.verdicts), seconds)
        self.steps.append(done)
        return value


class BarsAndWarnings(ConsoleReporter):
    """The verbs' progress on stderr; what else they say is among their step's findings."""

    def say(self, text: str) -> None:
        """Warnings only."""
        if text.startswith("warning"):
            super().say(text)


def print_outcome(console: Console, outcome: Outcome) -> None:
    """The closing table, the files and the next commands."""
    console.print()
    console.print(_table(outcome))
    failed = [v for step in outcome.steps for v in step.verdicts if not v.passed]
    for verdict in failed:
        console.print(Text(str(verdict), style="bold red"), soft_wrap=True)
    count = sum(len(step.verdicts) for step in outcome.steps)
    style = "bold green" if not failed else "bold red"
    verb = "passed" if not failed else f"passed, {len(failed)} FAILED"
    console.print(Text(f"{count - len(failed)} of {count} checks {verb} in "
                       f"{format_seconds(outcome.seconds)}", style=style))
    console.print("\nfiles written")
    for path, size in outcome.files.items():
        console.print(Text(f"  {format_bytes(size):>10}  {path}"), soft_wrap=True)
    console.print(Text(f"\nreport: {outcome.report}", style="bold"), soft_wrap=True)
    console.print("\nnext")
    for command in outcome.next_commands:
        console.print(Text(f"  {command}", style="cyan"), soft_wrap=True)


def _table(outcome: Outcome) -> Table:
    table = Table(title="The demo in one table", title_justify="left", title_style="bold")
    table.add_column("measured")
    for name in ("before", "after", "limit"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for promise in outcome.promises:
        mark = Text("pass", style="green") if promise.passed else Text("FAIL", style="bold red")
        table.add_row(*promise_row(promise), mark)
    training = outcome.training
    for name, value in (
        ("trainable share", f"{training.trainable_share:.2%}"),
        ("trainable parameters", format_count(training.trainable_parameters)),
        ("peak memory", f"{training.peak_memory_gib:.2f} GiB"),
        ("training speed", f"{outcome.tokens_per_second:,.0f} tokens/s"),
    ):
        table.add_row(name, "", value, "", "")
    return table


def promise_row(promise: Promise) -> tuple[str, str, str, str]:
    """What is measured on how much, before, after with the change where that is promised, limit."""
    exact = promise.metric == "exact_match"
    digits = 3 if exact else 4
    unit = "exact match" if exact else "bits per byte"
    after = f"{promise.after:.{digits}f}"
    if promise.role == "general":
        after += f" ({promise.after - promise.before:+.{digits}f})"
    return (f"{promise.title}\n  {unit} on {promise.records} held out",
            f"{promise.before:.{digits}f}", after, promise.limit)
