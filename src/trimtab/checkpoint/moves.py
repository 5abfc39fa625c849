"""Moves: how the bytes of one tensor of an output file follow from the tensors of a source.

Knows: boxes of stored tensors, stacking, casts row by row. Does not know: output files, threads,
where the source lies.

Every planned tensor can give any range of its bytes at any time and from any thread, which is all
that the writer (`stream`) and the loader (`share`) ask of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import DTYPE_BYTES, StoredTensor
from trimtab.checkpoint.boxes import gather, gathered_bytes
from trimtab.checkpoint.cast import decode_rows, find_bad, narrow, widen
from trimtab.checkpoint.converted import ConvertedSource
from trimtab.checkpoint.headers import Described
from trimtab.checkpoint.layout import PLAIN, Target
from trimtab.checkpoint.source import Source
from trimtab.errors import CheckpointError

# Rows of a cast or of a cut are read so many bytes at a time.
_CHUNK_BYTES = 2**20
_TENSORS_WITH_NAMES = 8


class PlannedTensor(Described, Protocol):
    """A tensor of an output file."""

    @property
    def grain(self) -> int:
        """Bytes that are made apart from all others, such as those of one expert; above 0."""

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `begin` on; checks them for NaN and infinity."""


class Pieces:
    """The stored tensors behind a target, kept for the few targets at work.

    A released model has up to half a million stored tensors; their names are made when needed.
    """

    def __init__(self, arch: ArchSpec) -> None:
        self._of = lru_cache(maxsize=_TENSORS_WITH_NAMES)(lambda target: target.stored(arch))

    def __call__(self, target: Target) -> tuple[StoredTensor, ...]:
        """The stored tensors of a target, in order."""
        found: tuple[StoredTensor, ...] = self._of(target)
        return found


@dataclass(frozen=True, slots=True)
class _OfTarget:
    """A tensor of a converted directory, to be made from a source."""

    target: Target
    source: Source

    @property
    def name(self) -> str:
        """Name in the file."""
        return self.target.name

    @property
    def dtype(self) -> str:
        """Safetensors dtype string."""
        return self.target.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.target.shape

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.num_bytes

    @property
    def grain(self) -> int:
        """Bytes of one part."""
        return max(1, self.target.piece_bytes)


@dataclass(frozen=True, slots=True)
class ByteMove(_OfTarget):
    """A target that has the same bytes as the boxes of the source it is made of."""

    pieces: Pieces = field(repr=False)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for all of it."""
        target = self.target
        width, pitch = len(target.columns) * target.item, target.matrix[1] * target.item
        return len(target.parts) * gathered_bytes(len(target.rows), width, pitch)

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `begin` on."""
        stored, size = self.pieces(self.target), self.target.piece_bytes
        for number, start, cut in _runs(begin, out, size):
            self._fill_piece(stored[number], start, cut)
            check_finite(cut, start, self.target.dtype, self.target.transform,
                         partial(_where, self.source, stored[number]), self._shape)

    @property
    def _shape(self) -> tuple[int, int]:
        """Rows and columns of the box that is held of each stored tensor."""
        return len(self.target.rows), len(self.target.columns)

    def _fill_piece(self, stored: StoredTensor, start: int, out: memoryview) -> None:
        target = self.target
        entry = self.source.entries()[stored.name]
        pitch = target.matrix[1] * target.item
        if entry.dtype != target.dtype or entry.num_bytes % pitch:
            rule = f"must be {target.dtype}, as the other tensors stacked with it"
            raise CheckpointError("TT304", _where(self.source, stored), rule, value=entry.dtype)
        if len(target.columns) == target.matrix[1]:
            self.source.read_into(stored.name, target.rows.start * pitch + start, out)
            return
        gather(
            lambda offset, view: self.source.read_into(stored.name, offset, view),
            pitch, target.rows.start, target.columns.start * target.item,
            len(target.columns) * target.item, start, out,
        )


@dataclass(frozen=True, slots=True)
class HeldMove(_OfTarget):
    """A target that a converted directory of the same layout holds as it is."""

    source: ConvertedSource

    @property
    def grain(self) -> int:
        """All bytes come from one range."""
        return max(1, self.num_bytes)

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `begin` on."""
        self.source.read_held(self.target, begin, out)
        check_finite(out, begin, self.target.dtype, self.target.transform,
                     lambda: f"{self.source.where}/{self.target.key.name}: {self.name}", self.shape)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for all of it."""
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class RawMove:
    """A tensor that keeps its released name and all its bytes."""

    source: Source
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def grain(self) -> int:
        """All bytes come from one range."""
        return max(1, self.num_bytes)

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `begin` on."""
        self.source.read_into(self.name, begin, out)


@dataclass(frozen=True, slots=True)
class CastMove(_OfTarget):
    """A plain target of another dtype or form than the source.

    Args:
        target: as the written architecture has it.
        source: the checkpoint.
        of_parts: the source's stored tensors of each part of the target, in order.
    """

    of_parts: Callable[[Target], Sequence[dict[str, StoredTensor]]] = field(repr=False)

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `begin` on."""
        parts = self.of_parts(self.target)
        for number, start, cut in _runs(begin, out, self.target.piece_bytes):
            self._fill_part(parts[number], start, cut)

    def _fill_part(self, of_part: dict[str, StoredTensor], start: int, out: memoryview) -> None:
        target = self.target
        row_bytes = len(target.columns) * target.item
        per_chunk = max(1, _CHUNK_BYTES // (target.matrix[1] * 4))
        first, last = start // row_bytes, (start + len(out) - 1) // row_bytes
        for begin in range(first, last + 1, per_chunk):
            rows = range(begin, min(begin + per_chunk, last + 1))
            raw = self._rows(of_part, rows)
            low, high = max(start, rows.start * row_bytes), min(start + len(out), rows.stop * row_bytes)
            offset = rows.start * row_bytes
            out[low - start : high - start] = raw[low - offset : high - offset]

    def _rows(self, of_part: dict[str, StoredTensor], rows: range) -> memoryview:
        """Rows of the target, counted from its first, as bytes."""
        target = self.target
        wanted = range(target.rows.start + rows.start, target.rows.start + rows.stop)
        plain = next((s for s in of_part.values() if s.transform in PLAIN), None)
        if plain is None:
            values = decode_rows(of_part, wanted, target.matrix[1], self._read)
        else:
            raw = self._read(plain, wanted, target.matrix[1])
            values = widen(raw, self.source.entries()[plain.name].dtype)
            values = values.reshape(len(wanted), target.matrix[1])
        if len(target.columns) != target.matrix[1]:
            values = values[:, target.columns.start : target.columns.stop]
        return narrow(values, target.dtype)

    def _read(self, stored: StoredTensor, rows: range, columns: int | None = None) -> memoryview:
        entry = self.source.entries()[stored.name]
        width = stored.shape[-1] if columns is None else columns
        pitch = width * DTYPE_BYTES[entry.dtype]
        raw = memoryview(bytearray(len(rows) * pitch))
        self.source.read_into(stored.name, rows.start * pitch, raw)
        check_finite(raw, rows.start * pitch, entry.dtype, stored.transform,
                     partial(_where, self.source, stored), (stored.num_bytes // pitch, width))
        return raw


def check_finite(
    raw: memoryview, start: int, dtype: str, transform: str, where: Callable[[], str],
    shape: Sequence[int],
) -> None:
    """Raise if whole elements among bytes of a tensor hold NaN, infinity or a NaN scale.

    Args:
        raw: bytes of the tensor; an element cut off at either end is not looked at.
        start: bytes of the tensor before `raw`.
        dtype: safetensors dtype string.
        transform: of the stored tensor.
        where: names file and tensor.
        shape: of the tensor, for the place of the first bad element.

    Raises:
        CheckpointError: TT310.
    """
    item = DTYPE_BYTES[dtype]
    low = -start % item
    high = low + (len(raw) - low) // item * item
    for begin in range(low, high, _CHUNK_BYTES):
        place = find_bad(raw[begin : min(begin + _CHUNK_BYTES, high)], dtype, transform)
        if place is None:
            continue
        rule = "a block scale of 255 is NaN" if transform == "mxfp4_scale" else "must be finite"
        raise CheckpointError(
            "TT310", where(),
            f"{rule}; first at {_index((start + begin) // item + place, shape)}",
            hint="copy the file again; if the source has it too, report it there",
        )


def _index(element: int, shape: Sequence[int]) -> list[int]:
    """Indices of an element of a row-major tensor."""
    found = []
    for size in reversed(shape[1:]):
        element, place = divmod(element, size)
        found.append(place)
    return [element, *reversed(found)]


def _where(source: Source, stored: StoredTensor) -> str:
    return f"{source.where}/{source.entries()[stored.name].file}: {stored.name}"


def _runs(begin: int, out: memoryview, size: int) -> list[tuple[int, int, memoryview]]:
    """Cut `out` at the borders of pieces of `size` bytes: number, start within, view."""
    found, done = [], 0
    while done < len(out):
        number, start = divmod(begin + done, size)
        count = min(size - start, len(out) - done)
        found.append((number, start, out[done : done + count]))
        done += count
    return found
