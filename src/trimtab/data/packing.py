"""Records laid end to end in rows of one length.

Knows: token arrays. Does not know: where records come from.

Records are not cut to fill a row. One that does not fit is held over for the next row while later
ones that fit go first; at most `HELD_OVER` wait, and the oldest always opens the next row. What
stays free at the end of a row is padding, counted to the last record so that every row is exactly
`length` long; it is masked from loss, routing statistics and states by `valid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimtab.data.encode import Encoded
from trimtab.data.images import ImagePatches

IGNORED = -100
HELD_OVER = 8
Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class Pack:
    """One row; T is the same for all rows of a run.

    Args:
        index: number of the row in the global stream, from 0.
        input_ids: int64 [T].
        labels: int64 [T]; the token after each position, `IGNORED` where none is to be predicted.
        cu_seqlens: int32 [N + 1]; bounds of the records, the last one takes the padding.
        valid: bool [T]; False on padding.
        num_supervised: labels that enter the loss.
        tokens_by_source: tokens without padding, by name of the file in the recipe.
        sources: name of the file of each record.
        images: of all records, in the order of their tokens.
        image_rows: int64 [M], positions of their placeholder tokens, ascending.
    """

    index: int
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    valid: NDArray[np.bool_]
    num_supervised: int
    tokens_by_source: dict[str, int]
    images: tuple[ImagePatches, ...] = ()
    image_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sources: tuple[str, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Length of each record, padding included in the last; sums to T."""
        return [int(n) for n in np.diff(self.cu_seqlens)]


def build_pack(
    index: int, records: Sequence[Encoded], sources: Sequence[str], length: int, pad_id: int
) -> Pack:
    """Lay records end to end.

    Args:
        index: number of the row.
        records: records of at most `length` tokens in all, at least one.
        sources: source name of each record.
        length: T.
        pad_id: token on padding.
    """
    total = sum(len(record) for record in records)
    if not records or total > length:
        raise ValueError(f"{len(records)} records of {total} tokens for a row of {length}")
    input_ids = np.full(length, pad_id, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    bounds = [0]
    by_source: dict[str, int] = {}
    images: list[ImagePatches] = []
    rows: list[int] = []
    for record, source in zip(records, sources, strict=True):
        begin, end = bounds[-1], bounds[-1] + len(record)
        input_ids[begin:end] = record.token_ids
        labels[begin : end - 1] = np.where(record.loss_mask[1:], record.token_ids[1:], IGNORED)
        images.extend(record.images)
        rows.extend(begin + row for row in record.image_rows)
        bounds.append(end)
        by_source[source] = by_source.get(source, 0) + len(record)
    bounds[-1] = length
    return Pack(
        index=index,
        input_ids=input_ids,
        labels=labels,
        cu_seqlens=np.asarray(bounds, np.int32),
        valid=np.arange(length) < total,
        num_supervised=int((labels != IGNORED).sum()),
        tokens_by_source=by_source,
        images=tuple(images),
        image_rows=np.asarray(rows, np.int64),
        sources=tuple(sources),
    )


class RowFiller(Generic[Tag]):
    """Chooses which records share a row.

    Args:
        length: T.
        packing: False gives every record a row of its own.
    """

    def __init__(self, length: int, packing: bool) -> None:
        self.length = length
        self._packing = packing
        self.waiting: list[tuple[Tag, Encoded]] = []

    def open_row(self) -> tuple[list[tuple[Tag, Encoded]], int]:
        """Start a row with what waits and fits, oldest first; return it and the free tokens."""
        row: list[tuple[Tag, Encoded]] = []
        free = self.length
        kept = []
        for item in self.waiting:
            if len(item[1]) <= free and (self._packing or not row):
                row.append(item)
                free -= len(item[1])
            else:
                kept.append(item)
        self.waiting = kept
        return row, free

    def wants_more(self, row: Sequence[object], free: int) -> bool:
        """Tell whether another record should be drawn for a row."""
        if not row:
            return True
        return self._packing and free > 0 and len(self.waiting) < HELD_OVER

    def add(self, row: list[tuple[Tag, Encoded]], free: int, item: tuple[Tag, Encoded]) -> int:
        """Put a drawn record into the row or hold it over; return the free tokens left."""
        if len(item[1]) <= free:
            row.append(item)
            return free - len(item[1])
        self.waiting.append(item)
        return free
