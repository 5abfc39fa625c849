"""How the sequences of a pack are cut into chunks and in which order the chunks are computed.

Chunks of all sequences lie in one list: first every sequence's first chunk (longest sequence
first), then every second chunk, and so on. Work inside chunks runs over the whole list at once;
the scan over chunk positions then needs as many steps as the longest sequence has chunks, and each
step is a contiguous slice of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """M chunks of C tokens covering N sequences of a flat pack of T tokens.

    Args:
        chunk_size: C.
        gather: [M * C] int64, token of each chunk slot; padded slots point at token 0.
        valid: [M * C] bool, False for padded slots.
        scatter: [T] int64, chunk slot of each token.
        steps: number of sequences alive at each chunk position, not increasing.
        order: [N] int64, sequences from longest to shortest.
    """

    chunk_size: int
    gather: Tensor
    valid: Tensor
    scatter: Tensor
    steps: tuple[int, ...]
    order: Tensor


def chunk_layout(lengths: Sequence[int], chunk_size: int, device: torch.device) -> ChunkLayout:
    """Lay out sequences of the given lengths (zero allowed)."""
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    starts = torch.cumsum(sizes, 0) - sizes
    counts = (sizes + chunk_size - 1) // chunk_size
    order = torch.argsort(counts, descending=True, stable=True)
    most = int(counts.max()) if len(sizes) else 0
    steps = tuple(int((counts > j).sum()) for j in range(most))
    rows: list[Tensor] = []
    for j, alive in enumerate(steps):
        ids = order[:alive]
        rows.append(torch.stack((starts[ids] + j * chunk_size, starts[ids] + sizes[ids]), 1))
    bounds = torch.cat(rows) if rows else torch.zeros(0, 2, dtype=torch.int64)
    slots = bounds[:, :1] + torch.arange(chunk_size)
    valid = slots < bounds[:, 1:]
    gather = torch.where(valid, slots, 0).flatten()
    flat_valid = valid.flatten()
    scatter = torch.empty(int(sizes.sum()), dtype=torch.int64)
    scatter[gather[flat_valid]] = torch.arange(gather.numel())[flat_valid]
    return ChunkLayout(
        chunk_size, gather.to(device), flat_valid.to(device), scatter.to(device), steps,
        order.to(device),
    )
