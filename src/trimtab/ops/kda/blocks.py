"""How a pack is cut into blocks that are computed at once: some chunks of some sequences.

Sequences are taken in groups from longest to shortest, each group segment by segment. A block is
[J chunks, G sequences, H heads, C rows]; rows past the end of a sequence are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.ops.kda.pair import CHUNK


@dataclass(frozen=True, slots=True)
class Block:
    """J chunks of G sequences.

    Args:
        sequences: the G sequences.
        segment: which segment of each of them.
        shape: (J, G).
        rows: [J * G * C] int64, token of each row; padding points at token 0. None where `span` holds.
        valid: [J, G, 1, C, 1] bool, False for padding; None where there is none.
        span: (begin, end) of tokens that are exactly the rows in their order, else None.
    """

    sequences: tuple[int, ...]
    segment: int
    shape: tuple[int, int]
    rows: Tensor | None
    valid: Tensor | None
    span: tuple[int, int] | None

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, H, X] -> [J, G, H, C, X], zeros in padding."""
        rows = x[self.span[0] : self.span[1]] if self.span else x[self.rows]
        blocks = rows.to(dtype).view(*self.shape, CHUNK, *rows.shape[1:]).transpose(2, 3)
        if self.valid is None:
            return blocks.contiguous()
        return torch.where(self.valid, blocks, 0)

    def put(self, x: Tensor, out: Tensor) -> None:
        """Write [J, G, H, C, X] into the rows of out [T, H, X]."""
        rows = x.transpose(2, 3).flatten(0, 2).to(out.dtype)
        if self.span:
            out[self.span[0] : self.span[1]] = rows
        elif self.valid is None:
            out[self.rows] = rows
        else:
            keep = self.valid.flatten()
            assert self.rows is not None, "a block without a span has rows"
            out[self.rows[keep]] = rows[keep]


def groups(borders: list[int], heads: int, segment_chunks: int, batch: int) -> Iterator[list[int]]:
    """Sequences that are computed together, longest first; empty ones are in no group.

    Args:
        borders: [N+1].
        heads: H.
        segment_chunks: most chunks of a segment.
        batch: about how many chunks times heads make a block.
    """
    counts = {n: -(-(borders[n + 1] - borders[n]) // CHUNK) for n in range(len(borders) - 1)}
    order = sorted((n for n in counts if counts[n]), key=lambda n: -counts[n])
    while order:
        deep = min(counts[order[0]], segment_chunks)
        size = max(1, batch // (heads * deep))
        yield order[:size]
        order = order[size:]


def segments(
    group: list[int], borders: list[int], segment_chunks: int, device: torch.device
) -> list[Block]:
    """The blocks of a group in order; sequences that have ended leave the later ones."""
    length = segment_chunks * CHUNK
    longest = borders[group[0] + 1] - borders[group[0]]
    found = []
    for segment in range(-(-longest // length)):
        begins = [(n, borders[n] + segment * length) for n in group]
        alive = [(n, begin) for n, begin in begins if begin < borders[n + 1]]
        found.append(_block(alive, borders, segment, length, device))
    return found


def _block(
    alive: list[tuple[int, int]], borders: list[int], segment: int, length: int,
    device: torch.device,
) -> Block:
    sizes = [min(length, borders[n + 1] - begin) for n, begin in alive]
    chunks = -(-max(sizes) // CHUNK)
    sequences, shape = tuple(n for n, _ in alive), (chunks, len(alive))
    if len(alive) == 1 and sizes[0] == chunks * CHUNK:
        begin = alive[0][1]
        return Block(sequences, segment, shape, None, None, (begin, begin + sizes[0]))
    offsets = torch.arange(chunks * CHUNK, device=device).view(chunks, 1, CHUNK)
    starts = torch.tensor([begin for _, begin in alive], device=device).view(1, -1, 1)
    valid = offsets < torch.tensor(sizes, device=device).view(1, -1, 1)
    rows = torch.where(valid, starts + offsets, 0).flatten()
    return Block(sequences, segment, shape, rows, valid.view(*shape, 1, CHUNK, 1), None)
