"""Tokens per expert over one global batch.

Knows: counts. Does not know: routers, why a batch is uneven.

Shape letters: E experts.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class RouterLoad:
    """Adds up the counts of every micro-batch, each layer once, recomputation aside."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def micro_batch(self) -> Callable[[int, Tensor], None]:
        """A sink `(layer, tokens per expert [E])` for one micro-batch."""
        seen: set[int] = set()

        def sink(layer: int, counts: Tensor) -> None:
            if layer in seen:  # the layer is being recomputed
                return
            seen.add(layer)
            before = self._counts.get(layer)
            self._counts[layer] = counts if before is None else before + counts

        return sink

    def add(self, other: RouterLoad) -> None:
        """Add the counts of another."""
        for layer, counts in other._counts.items():
            before = self._counts.get(layer)
            self._counts[layer] = counts if before is None else before + counts

    def histogram(self) -> dict[str, list[int]]:
        """Tokens per expert by layer."""
        return {str(layer): counts.tolist() for layer, counts in sorted(self._counts.items())}

    def max_over_mean(self) -> dict[str, float]:
        """Load of the busiest expert over the mean load, per layer; 1 is perfect balance."""
        return {
            str(layer): round(float(counts.max()) * counts.numel() / max(1, int(counts.sum())), 4)
            for layer, counts in sorted(self._counts.items())
        }
