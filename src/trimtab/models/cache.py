"""Decoding state of N sequences: recurrent state for KDA, latents for MLA.

Linear attention keeps a state of fixed size; latent attention keeps one normed latent and one
shared key part per token, and with an indexer one index key per token or per pool of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class KDACache:
    """State of one KDA layer.

    Args:
        tails: three tensors [N, k-1, P], last inputs of the q, k and v convolutions.
        state: [N, H, K, V], at least float32.
    """

    tails: tuple[Tensor, Tensor, Tensor] | None = None
    state: Tensor | None = None


@dataclass(slots=True)
class CachedRows:
    """A buffer [N, S, width] of one row per token, or per pool, that grows by doubling.

    Args:
        rows: None before the first row.
    """

    rows: Tensor | None = None

    def append(self, new: Tensor, sequence_ids: Tensor, slots: Tensor, needed: int) -> Tensor:
        """Write new [R, width] at (sequence, slot) and return the first `needed` rows.

        Args:
            new: rows.
            sequence_ids: [R], ascending up to N-1.
            slots: [R].
            needed: rows per sequence that are read.
        """
        num_sequences = int(sequence_ids[-1]) + 1 if self.rows is None else self.rows.shape[0]
        if self.rows is None or self.rows.shape[1] < needed:
            old = self.rows
            size = max(needed, 2 * (0 if old is None else old.shape[1]), 64)
            self.rows = new.new_zeros(num_sequences, size, new.shape[1])
            if old is not None:
                self.rows[:, : old.shape[1]] = old
        self.rows[sequence_ids, slots] = new
        return self.rows[:, :needed]

    def keep(self, sequences: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self.rows = None if self.rows is None else self.rows[sequences]


@dataclass(slots=True)
class PoolCache:
    """Pooled keys, and what the tokens of the pools still open bring to theirs.

    Args:
        pools: one key per pool; that of an open pool is written again when it closes.
        tail: [N, m, 2K], keys and gates of the open pool of each sequence; entries beyond its
            tokens may hold anything.
    """

    pools: CachedRows = field(default_factory=CachedRows)
    tail: Tensor | None = None

    def keep(self, sequences: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self.pools.keep(sequences)
        self.tail = None if self.tail is None else self.tail[sequences]


@dataclass(slots=True)
class MLACache:
    """State of one MLA layer.

    Args:
        latents: latent and shared key part of each token, side by side.
        index: index key of each token, unused without an indexer.
        pools: pooled index keys instead, where the indexer pools.
    """

    latents: CachedRows = field(default_factory=CachedRows)
    index: CachedRows = field(default_factory=CachedRows)
    pools: PoolCache = field(default_factory=PoolCache)

    def keep(self, sequences: Tensor) -> None:
        """Keep only these sequences, in this order."""
        for part in (self.latents, self.index, self.pools):
            part.keep(sequences)


@dataclass(slots=True)
class ModelCache:
    """Caches of all layers and the number of tokens each sequence has so far.

    Args:
        layers: one cache per decoder layer.
        lengths: [N] int64, tokens already processed.
    """

    layers: list[KDACache | MLACache]
    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def keep(self, sequences: Tensor) -> None:
        """Keep only these sequences, in this order.

        Args:
            sequences: [M] int64, indices into the N sequences.
        """
        self.lengths = self.lengths[sequences]
        for layer in self.layers:
            if isinstance(layer, MLACache):
                layer.keep(sequences)
                continue
            if layer.state is not None and layer.tails is not None:
                layer.state = layer.state[sequences]
                q, k, v = layer.tails
                layer.tails = (q[sequences], k[sequences], v[sequences])
