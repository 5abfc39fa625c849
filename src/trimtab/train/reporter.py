"""What a running job tells people, on stderr.

Knows: text, tables, progress bars. Does not know: what is trained.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trimtab.train.plan import RunPlan
from trimtab.units import format_bytes, format_count

# A bar becomes lines where stderr is no terminal: no more than these, and none closer than that.
_PLAIN_LINES = 20
_PLAIN_SECONDS = 1.0


class Update(Protocol):
    """Tells a bar how far the work is."""

    def __call__(self, done: int, total: int, words: str = "") -> None:
        """Units done, units in all, and a few words."""


class Reporter(Protocol):
    """Where the loop sends its words."""

    def say(self, text: str) -> None:
        """One line."""

    def plan(self, plan: RunPlan) -> None:
        """The target table and the batch arithmetic."""

    def progress(self, title: str) -> AbstractContextManager[Update]:
        """A bar for the time of a `with` block."""


class ConsoleReporter:
    """Rich text on stderr; plain lines where it is not a terminal.

    Args:
        console: None for stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console(stderr=True, highlight=False) if console is None else console

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def plan(self, plan: RunPlan) -> None:
        """The target table and the batch arithmetic."""
        self.console.print(target_grid(plan))
        for line in plan_lines(plan):
            self.say(line)

    @contextmanager
    def progress(self, title: str) -> Iterator[Update]:
        """A bar, or at most `_PLAIN_LINES` lines where stderr is no terminal."""
        if not self.console.is_terminal:
            yield self._plain(title)
            return
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                   TextColumn("{task.fields[words]}"))
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(title, total=None, words="")

            def update(done: int, total: int, words: str = "") -> None:
                bar.update(task, completed=done, total=total, words=words)

            yield update

    def _plain(self, title: str) -> Update:
        shown, said = -1, time.monotonic()

        def update(done: int, total: int, words: str = "") -> None:
            nonlocal shown, said
            part = done * _PLAIN_LINES // max(1, total)
            due = time.monotonic() >= said + _PLAIN_SECONDS or done >= total
            if part > shown and due:
                shown, said = part, time.monotonic()
                self.say(f"{title} {done}/{total} {words}".rstrip())

        return update


class SilentReporter:
    """Says nothing; for tests and library use."""

    def say(self, text: str) -> None:
        """Drop the line."""

    def plan(self, plan: RunPlan) -> None:
        """Drop the table."""

    @contextmanager
    def progress(self, title: str) -> Iterator[Update]:
        """Drop the updates."""

        def update(done: int, total: int, words: str = "") -> None:
            pass

        yield update


def target_grid(plan: RunPlan) -> Table:
    """The target table."""
    grid = Table(title="LoRA targets", title_justify="left")
    for name in ("module", "layers"):
        grid.add_column(name)
    for name in ("adapted", "parameters", "fp32 bytes"):
        grid.add_column(name, justify="right")
    if plan.serving:
        grid.add_column("servable")
    for number, row in enumerate(plan.table.rows):
        answer = [plan.serving[number].answer] if plan.serving else []
        grid.add_row(row.leaf, row.kind, f"{row.count} of {row.available}",
                     format_count(row.num_parameters), format_bytes(row.num_bytes), *answer)
    return grid


def plan_lines(plan: RunPlan) -> Sequence[str]:
    """Totals, coverage notes and batch arithmetic."""
    table = plan.table
    total = (
        f"trainable: {table.num_parameters:,} parameters in {len(plan.targets)} modules, "
        f"{plan.trainable_share:.3%} of {format_count(plan.base_parameters)}, "
        f"{format_bytes(table.num_bytes)}"
    )
    notes = [f"note: {note}" for note in table.notes]
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    return [total, *notes, *warnings, f"batch: {plan.batch}"]
