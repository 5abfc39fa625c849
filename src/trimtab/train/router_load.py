"""What the routers did in one global batch: tokens per expert, drops, the load-balancing loss.

Knows: counts, histograms of needed biases. Does not know: why a batch is uneven, who asks.

Shape letters: A active experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trimtab.models.context import Routing
from trimtab.models.decoder import CausalLM
from trimtab.models.moe import Router
from trimtab.ops.moe.balance import balance_loss, balanced_bias, bias_histogram

Balance = Literal["none", "quantile", "aux"]


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """What training does about the load of experts.

    Args:
        balance: `quantile` moves the selection biases, `aux` adds a loss.
        aux_loss_coef: weight of that loss, which every routed layer adds.
        capacity: most tokens of an expert over the mean load of a micro-batch.
    """

    balance: Balance = "none"
    aux_loss_coef: float = 0.0
    capacity: float | None = None


class RouterLoad:
    """Adds up what the micro-batches did, each layer once, recomputation aside.

    Args:
        histograms: keep what `histograms` gives.
    """

    def __init__(self, *, histograms: bool = False) -> None:
        self.keeps_histograms = histograms
        self._counts: dict[int, Tensor] = {}
        self._dropped: dict[int, Tensor] = {}
        self._histograms: dict[int, Tensor] = {}
        self._balance: dict[int, float] = {}

    def record(self, routing: Routing, balance: Tensor | None = None) -> None:
        """Count one layer of one micro-batch.

        Args:
            routing: what its router did.
            balance: its load-balancing loss, summed over tokens.
        """
        _add(self._counts, routing.layer, routing.tokens_per_expert)
        if routing.dropped is not None:
            _add(self._dropped, routing.layer, routing.dropped)
        if self.keeps_histograms:
            active = routing.ids.shape[1]
            found = bias_histogram(routing.scores.detach(), routing.bias, active, routing.valid)
            _add(self._histograms, routing.layer, found)
        if balance is not None:
            self._balance[routing.layer] = self._balance.get(routing.layer, 0.0) + balance.item()

    def add(self, other: RouterLoad) -> None:
        """Add the counts of another."""
        for layer, counts in other._counts.items():
            _add(self._counts, layer, counts)

    def histogram(self) -> dict[str, list[int]]:
        """Tokens per expert by layer."""
        return {str(layer): counts.tolist() for layer, counts in sorted(self._counts.items())}

    @property
    def bias_histograms(self) -> dict[int, Tensor]:
        """[E, bins] by layer, see `ops.moe.balance`."""
        return self._histograms

    def max_over_mean(self) -> dict[str, float]:
        """Load of the busiest expert over the mean load, per layer; 1 is perfect balance."""
        return {
            str(layer): round(float(counts.max()) * counts.numel() / max(1, int(counts.sum())), 4)
            for layer, counts in sorted(self._counts.items())
        }

    def dropped(self) -> dict[str, int]:
        """Choices dropped by the capacity, per layer; empty without one."""
        return {str(layer): int(counts.sum()) for layer, counts in sorted(self._dropped.items())}

    def balance(self, tokens: int) -> float | None:
        """The load-balancing loss per token, mean over layers; None where none was taken."""
        if not self._balance:
            return None
        return sum(self._balance.values()) / len(self._balance) / max(1, tokens)


class RoutingSink:
    """Takes what the routers of one micro-batch do.

    Args:
        load: of the global batch; None counts nothing.
        lengths: tokens of each sequence, for the load-balancing loss; None takes no such loss.
    """

    def __init__(self, load: RouterLoad | None, lengths: Sequence[int] | None) -> None:
        self._load, self._seen = load, set[int]()
        self._losses: list[Tensor] = []
        self._sequences: Tensor | None = None
        if lengths is not None:
            counts = torch.tensor(list(lengths))
            self._sequences = torch.repeat_interleave(torch.arange(len(counts)), counts)

    def __call__(self, routing: Routing) -> None:
        """One router; a second time where its layer is computed again."""
        loss = None
        if self._sequences is not None:
            # In recomputation too: both passes must save the same tensors.
            sequences = self._sequences.to(routing.ids.device)
            loss = balance_loss(routing.scores, routing.ids, sequences, routing.valid)
        if routing.layer in self._seen:
            return
        self._seen.add(routing.layer)
        if loss is not None:
            self._losses.append(loss)
        if self._load is not None:
            self._load.record(routing, loss)

    @property
    def balance(self) -> Tensor | None:
        """The load-balancing loss, summed over layers and tokens, with its graph."""
        return torch.stack(self._losses).sum() if self._losses else None


@torch.no_grad()
def rebalance(model: CausalLM, load: RouterLoad) -> None:
    """Set every selection bias to that which would have spread the counted tokens evenly."""
    for layer, histogram in load.bias_histograms.items():
        router = model.get_submodule(f"layers.{layer}.mlp.router")
        assert isinstance(router, Router), "histograms come from routers"
        bias = router.e_score_correction_bias
        bias.copy_(balanced_bias(histogram, bias, router.rule.top_k))


def _add(sums: dict[int, Tensor], layer: int, counts: Tensor) -> None:
    before = sums.get(layer)
    sums[layer] = counts if before is None else before + counts
