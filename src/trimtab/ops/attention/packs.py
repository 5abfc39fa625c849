"""Packs of sequences seen in blocks of queries.

A block of queries reads keys from the start of its first query's sequence up to its own last
query, so packs of short sequences cost what the sequences cost and nothing is ever T x T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class PackBorders:
    """Sequence starts of a pack: per token on the device, per query block on the host.

    Args:
        lengths: tokens per sequence.
        starts: [T] int64, position of the first token of each token's sequence.
        block_starts: key position from which each block of `QUERY_BLOCK` queries reads.
        block_ends: where the sequence of each block's first query ends.
        byte_starts: where each block's rows begin in a mask packed into bits, and its size at the
            end; a row of a block takes whole bytes.
    """

    lengths: tuple[int, ...]
    starts: Tensor
    block_starts: tuple[int, ...]
    block_ends: tuple[int, ...]
    byte_starts: tuple[int, ...]

    @property
    def total(self) -> int:
        """T, tokens of the pack."""
        return self.starts.shape[0]

    @property
    def mean_visible(self) -> int:
        """Keys that a query sees on average, at least 1."""
        pairs = sum(n * (n + 1) // 2 for n in self.lengths)
        return max(pairs // max(self.total, 1), 1)

    @property
    def visited_pairs(self) -> int:
        """Pairs of query and key that lie in some block, hidden ones included."""
        return sum((q.stop - q.start) * (k.stop - k.start) for q, k in blocks(self))

    @property
    def widest(self) -> int:
        """Most keys that one block reads."""
        return max((k.stop - k.start for _, k in blocks(self)), default=0)


def pack_borders(lengths: tuple[int, ...], device: torch.device) -> PackBorders:
    """Borders of a pack of sequences of the given lengths."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    begins = torch.cumsum(sizes, 0) - sizes
    starts = torch.repeat_interleave(begins, sizes, output_size=sum(lengths))
    spans = block_sequences(lengths)
    key_starts, ends = tuple(span.start for span in spans), tuple(span.stop for span in spans)
    return PackBorders(
        tuple(lengths), starts.to(device), key_starts, ends, _byte_starts(key_starts, len(starts))
    )


def _byte_starts(key_starts: tuple[int, ...], total: int) -> tuple[int, ...]:
    sizes = [0]
    for n, key_start in enumerate(key_starts):
        begin, end = n * QUERY_BLOCK, min((n + 1) * QUERY_BLOCK, total)
        sizes.append((end - begin) * row_bytes(end - key_start))
    return tuple(accumulate(sizes))


def row_bytes(width: int) -> int:
    """Bytes of one row of bits.

    >>> [row_bytes(n) for n in (1, 8, 9)]
    [1, 1, 2]
    """
    return (width + 7) // 8


def block_sequences(lengths: tuple[int, ...]) -> list[slice]:
    """The sequence that holds the first query of each block.

    >>> block_sequences((100, 0, 60))
    [slice(0, 100, None), slice(100, 160, None)]
    """
    ends = list(accumulate(lengths))
    found, sequence = [], 0
    for query in range(0, ends[-1] if ends else 0, QUERY_BLOCK):
        while ends[sequence] <= query:
            sequence += 1
        found.append(slice(ends[sequence] - lengths[sequence], ends[sequence]))
    return found


def blocks(borders: PackBorders) -> Iterator[tuple[slice, slice]]:
    """Query blocks with the keys they can see."""
    for n, key_start in enumerate(borders.block_starts):
        begin = n * QUERY_BLOCK
        end = min(begin + QUERY_BLOCK, borders.total)
        yield slice(begin, end), slice(key_start, end)


def visible_mask(borders: PackBorders, queries: slice, keys: slice) -> Tensor:
    """[queries, keys] bool: key in the same sequence and not after the query."""
    device = borders.starts.device
    key = torch.arange(keys.start, keys.stop, device=device)
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return (key <= query) & (key >= borders.starts[queries].unsqueeze(1))
