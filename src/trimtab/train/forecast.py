"""What a run says of its memory: the peak it expects before the first step, and the one it had.

Knows: the prediction, this process, what the machine has left. Does not know: tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.config.recipe import Recipe
from trimtab.train.memory import available_bytes, resident_bytes
from trimtab.train.plan import RunPlan
from trimtab.train.predicted import predict_memory
from trimtab.units import format_bytes

_GIB = 2**30
# Libraries and buffers that the first step of a process brings in and keeps: 50 to 90 MiB.
_FIRST_STEP = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected peak of this process.

    Args:
        resident: bytes with model and adapters loaded.
        steps: bytes that a step takes beside them at its peak.
        available: bytes that the machine has left, None if not known.
    """

    resident: int
    steps: float
    available: int | None

    @property
    def peak_gib(self) -> float:
        """Expected peak of resident memory."""
        return (self.resident + self.steps) / _GIB

    def lines(self) -> Iterator[str]:
        """What to say before the first step."""
        yield (
            f"memory: {format_bytes(self.resident)} with the model loaded, a step takes "
            f"{format_bytes(self.steps)} more at its peak (predicted): {self.peak_gib:.2f} GiB"
        )
        if self.available is not None and self.steps > self.available:
            yield (
                f"warning: the machine has {format_bytes(self.available)} left; use a smaller "
                "finetune.batch.micro_batch_tokens or data.max_seq_len"
            )


def forecast(recipe: Recipe, plan: RunPlan) -> Forecast | None:
    """The forecast of this process, whose model is loaded; None where its memory is not known."""
    resident = resident_bytes()
    if resident is None:
        return None
    steps = predict_memory(
        plan.arch, plan.targets, plan.batch, recompute=recipe.finetune.recompute
    ).peak
    return Forecast(resident, steps + _FIRST_STEP, available_bytes())


def compared(forecast: Forecast | None, peak_gib: float) -> str:
    """The peak that a run had beside the one that was expected."""
    expected = "" if forecast is None else f", predicted {forecast.peak_gib:.2f} GiB"
    return f"peak memory: {peak_gib:.2f} GiB{expected}"
