"""Learning-rate schedules as pure functions of the step.

Knows: shapes of curves. Does not know: optimizers, torch. Nothing is stored, so a resumed run
reads the same value by asking for the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SchedulerName = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, then decay to zero at `total_steps`.

    Args:
        kind: curve after the warm-up.
        total_steps: steps of the run.
        warmup_steps: steps of the linear rise; 0 for none.
    """

    kind: SchedulerName
    total_steps: int
    warmup_steps: int

    @classmethod
    def from_ratio(cls, kind: SchedulerName, total_steps: int, warmup_ratio: float) -> Schedule:
        """A schedule whose warm-up is a share of the steps, rounded up."""
        return cls(kind, total_steps, math.ceil(warmup_ratio * total_steps))

    def factor(self, step: int) -> float:
        """Factor on the base learning rate for step `step`, counted from 0.

        The first step already moves (1 / warmup_steps) and the last one still does.

        >>> Schedule("linear", 10, 2).factor(0)
        0.5
        >>> Schedule("cosine", 10, 0).factor(5)
        0.5
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        remaining = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / remaining) if remaining > 0 else 1.0
        if self.kind == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress))
