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

from trimtab.demo.outcome import Outcome, Step, goal_verdicts, only_set
from trimtab.demo.settings import Settings
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


def print_outcome(console: Console, outcome: Outcome, settings: Settings) -> None:
    """The closing table, the files and the next commands."""
    console.print()
    console.print(_table(outcome, settings))
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


def _table(outcome: Outcome, settings: Settings) -> Table:
    table = Table(title="The demo in one table", title_justify="left", title_style="bold")
    table.add_column("measured")
    for name in ("before", "after", "limit"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for name, before, after, limit, passed in goal_rows(outcome, settings):
        mark = Text("pass", style="green") if passed else Text("FAIL", style="bold red")
        table.add_row(name, before, after, limit, mark)
    training = outcome.training
    for name, value in (
        ("trainable share", f"{training.trainable_share:.2%}"),
        ("trainable parameters", format_count(training.trainable_parameters)),
        ("peak memory", f"{training.peak_memory_gib:.2f} GiB"),
        ("training speed", f"{outcome.tokens_per_second:,.0f} tokens/s"),
    ):
        table.add_row(name, "", value, "", "")
    return table


def goal_rows(outcome: Outcome, settings: Settings) -> list[tuple[str, str, str, str, bool]]:
    """The promises of the demo: name, before, after, limit, kept."""
    exact, bits = outcome.exact_match, outcome.bits_per_byte
    words = only_set(outcome.after, "domain").num_records
    goals = goal_verdicts(outcome.before, outcome.after, settings)
    return [
        (f"exact match on {words} held-out words", f"{exact[0]:.3f}", f"{exact[1]:.3f}",
         f"before <= {settings.max_before:.2f}, after >= {settings.min_after:.2f}",
         goals[0].passed and goals[1].passed),
        ("general text, bits per byte", f"{bits[0]:.4f}",
         f"{bits[1]:.4f} ({bits[1] - bits[0]:+.4f})", f"at most {settings.max_general_rise:+.2f}",
         goals[2].passed),
    ]
