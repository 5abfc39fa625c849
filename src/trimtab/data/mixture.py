"""Which source the next record comes from, and which record of it.

Knows: ratios, token counts, epochs. Does not know: files, tokens, packs.

The ratio is a share of tokens: the next record comes from the source that is furthest below its
share of what was fed. At every prefix each source is therefore within one record of its share.
An exhausted source starts over in an order drawn from (seed, source, epoch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Where a record stands in the stream of its source.

    Args:
        source: index of the source.
        epoch: pass over the source, from 0.
        position: place in the order of that pass.
    """

    source: int
    epoch: int
    position: int


@dataclass(slots=True)
class Progress:
    """How far one source is.

    Args:
        epoch: current pass.
        position: next place in the order of this pass.
        tokens: tokens fed so far.
        records: records fed so far.
    """

    epoch: int = 0
    position: int = 0
    tokens: int = 0
    records: int = 0


def epoch_order(seed: int, source: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Order of one pass over a source, a permutation of 0..size-1.

    Sorts raw generator output, which numpy keeps stable between versions; its shuffles it does
    not.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, source, epoch])).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)


class Mixture:
    """Deals record references from several sources by largest deficit of tokens.

    Args:
        sizes: records per source.
        ratios: share of the tokens per source; sums to 1.
        seed: of the orders.
    """

    def __init__(self, sizes: Sequence[int], ratios: Sequence[float], seed: int) -> None:
        if len(sizes) != len(ratios) or not sizes:
            raise ValueError("sizes and ratios must have one item per source")
        self._sizes = tuple(sizes)
        self._ratios = tuple(ratios)
        self._seed = seed
        self.progress = [Progress() for _ in sizes]
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}

    def next_ref(self) -> RecordRef:
        """The next record; report its length with `feed` before asking for another."""
        total = sum(p.tokens for p in self.progress)
        deficits = [
            ratio * total - p.tokens if ratio > 0 else -np.inf
            for ratio, p in zip(self._ratios, self.progress, strict=True)
        ]
        source = int(np.argmax(deficits))
        progress = self.progress[source]
        if progress.position == self._sizes[source]:
            progress.epoch, progress.position = progress.epoch + 1, 0
        ref = RecordRef(source, progress.epoch, progress.position)
        progress.position += 1
        return ref

    def feed(self, ref: RecordRef, num_tokens: int) -> None:
        """Count a dealt record; 0 tokens for one that was skipped."""
        self.progress[ref.source].tokens += num_tokens
        self.progress[ref.source].records += num_tokens > 0

    def index(self, ref: RecordRef) -> int:
        """Index of the record in its file."""
        key = (ref.source, ref.epoch)
        if key not in self._orders:
            # Only the current pass and, for records held over, the one before it are needed.
            for old in [k for k in self._orders if k[0] == ref.source and k[1] < ref.epoch - 1]:
                del self._orders[old]
            self._orders[key] = epoch_order(self._seed, *key, self._sizes[ref.source])
        return int(self._orders[key][ref.position])

    def state(self) -> list[dict[str, int]]:
        """Progress of every source as plain values."""
        return [
            {"epoch": p.epoch, "position": p.position, "tokens": p.tokens, "records": p.records}
            for p in self.progress
        ]

    def restore(self, state: Sequence[Mapping[str, int]]) -> None:
        """Continue from what `state` returned."""
        if len(state) != len(self.progress):
            raise ValueError(f"state of {len(state)} sources for {len(self.progress)}")
        self.progress = [Progress(**item) for item in state]
