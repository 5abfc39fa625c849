"""Audit: a converted directory read again and held against its source, tensor by tensor.

Knows: headers, names, how shards of a tensor fit together by their shapes. Uses neither the layout
nor the moves, casts and direct reads of the writer, so that a fault in one of them shows.

A cast is not repeated but judged: a rounded element must be at least as near to the exact value as
both its neighbours, and even where two are equally near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trimtab.arch.load import load_arch, parse_config
from trimtab.arch.maps import is_carried, stored_of
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.files import FileStore, LocalStore
from trimtab.checkpoint.headers import DTYPE_SIZES, TensorEntry, read_header
from trimtab.checkpoint.remote import RemoteStore
from trimtab.checkpoint.source import Source
from trimtab.checkpoint.structure import is_skipped
from trimtab.errors import CheckpointError
from trimtab.verdict import Verdict

Floats: TypeAlias = NDArray[np.float64]
ReadTensor = Callable[[str, int, int], bytes]
"""Bytes of a tensor of the source: name, start, count."""

_CHUNK_BYTES = 2**20
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_UNCHANGED = ("same", "reshape", "pad_tail")


def audit_conversion(
    source: Source, out: str | Path, progress: Callable[[str, int, int], None] | None = None
) -> list[Verdict]:
    """Compare every tensor of a finished conversion with the source.

    Args:
        source: what was converted.
        out: the converted directory or URL.
        progress: called with a file, bytes compared and bytes in all.

    Returns:
        Whether all tensors are equal, all of the source is there, and nothing else is.

    Raises:
        CheckpointError: a file cannot be read.
    """
    arch = load_arch(source.config(), source.where)
    store: FileStore = RemoteStore(str(out)) if "://" in str(out) else LocalStore(Path(out))
    found = _Result(source, store, progress)
    read = _plain_reader(source)
    for param in inventory(arch):
        parts: dict[tuple[int, ...], list[StoredTensor]] = {}
        for stored in stored_of(arch, param):
            parts.setdefault(stored.index, []).append(stored)
        for number, index in enumerate(sorted(parts)):
            found.compare(_Part(param, number, parts[index]), read)
    for name in source.entries():
        if is_skipped(arch, name):
            found.compare_raw(name, read)
    return found.verdicts(len(source.entries()))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a parameter: its number along the leading axes and what holds it in the source."""

    param: ParamSpec
    number: int
    stored: Sequence[StoredTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.param.shape[len(self.stored[0].index):]


class _Rows:
    """Rows of a matrix put together from shards that are divided along one axis."""

    def __init__(
        self, store: _PlainStore, shards: Sequence[TensorEntry], number: int, leading: int,
        shape: tuple[int, ...],
    ) -> None:
        self._store = store
        self.rows, self.columns = (shape[0] if shape else 1), prod(shape[1:])
        self.item = DTYPE_SIZES[shards[0].dtype]
        self._boxes: list[tuple[TensorEntry, int, int, int]] = []  # begin, rows, columns
        for shard in shards:
            count = prod(shard.shape[:leading])
            if leading and not 0 <= number < count:
                number -= count
                continue
            own = shard.shape[leading:]
            rows, columns = (own[0] if own else 1), prod(own[1:])
            begin = number * rows * columns * self.item if leading else 0
            self._boxes.append((shard, begin, rows, columns))
            if leading:
                break

    def read(self, first: int, last: int) -> bytes:
        """Rows `first` to `last`, row by row; empty if the shards do not make up the matrix."""
        if all(columns == self.columns for *_, columns in self._boxes):
            return self._below(first, last)
        if sum(columns for *_, columns in self._boxes) != self.columns:
            return b""
        beside = []
        for shard, begin, _, columns in self._boxes:
            pitch = columns * self.item
            raw = self._store.read(shard, begin + first * pitch, (last - first) * pitch)
            beside.append(np.frombuffer(raw, np.uint8).reshape(last - first, pitch))
        return np.concatenate(beside, 1).tobytes()

    def _below(self, first: int, last: int) -> bytes:
        pitch, found, passed = self.columns * self.item, b"", 0
        for shard, begin, rows, _ in self._boxes:
            low, high = max(first, passed) - passed, min(last, passed + rows) - passed
            if low < high:
                found += self._store.read(shard, begin + low * pitch, (high - low) * pitch)
            passed += rows
        return found


class _PlainStore:
    """Reads through ordinary files, not the direct reads of the writer."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        names = [name for name in store.list() or () if name.endswith(".safetensors")]
        self.shards: dict[str, list[TensorEntry]] = {}
        for name in sorted(names):
            size = store.size(name) or 0
            for tensor, entry in read_header(partial(self._at, name), size, name).items():
                self.shards.setdefault(tensor, []).append(entry)

    def read(self, entry: TensorEntry, start: int, count: int) -> bytes:
        return self._at(entry.file, entry.begin + start, count)

    def _at(self, name: str, offset: int, count: int) -> bytes:
        return _plain_read(self._store, name, offset, count)


class _Result:
    """What was compared and what was found."""

    def __init__(
        self, source: Source, store: FileStore, progress: Callable[[str, int, int], None] | None
    ) -> None:
        self._source = source
        self._out = _PlainStore(store)
        config = parse_config(_whole(store, "config.json").decode(), f"{store.root}/config.json")
        self._arch = load_arch(config, store.root)
        self._has_mtp = bool(self._arch.mtp)
        self._progress = progress
        shards = self._out.shards.values()
        self._total = sum(entry.num_bytes for entries in shards for entry in entries)
        self._done = self._compared = 0
        self._differing: list[str] = []
        self._seen: set[str] = set()

    def compare(self, part: _Part, read: ReadTensor) -> None:
        """Hold one part of a parameter against the result."""
        shards, name = self._out.shards, part.param.name
        plain = part.stored[0] if part.stored[0].transform in _UNCHANGED else None
        if plain is None and name not in shards:
            for stored in part.stored:
                kind = f"{name}.{stored.transform.rpartition('_')[2]}"
                self._compare_bytes(part, kind, stored.shape, stored, read)
            return
        dtype = self._source.entries()[plain.name].dtype if plain is not None else ""
        if plain is not None and name in shards and shards[name][0].dtype == dtype:
            self._compare_bytes(part, name, part.shape, plain, read)
            return
        self._compare_values(part, name, dtype, read)

    def compare_raw(self, name: str, read: ReadTensor) -> None:
        """Hold a tensor of a skipped layer against the result, which may say it has no such layer."""
        if name not in self._out.shards:
            self._compared += not (self._has_mtp or is_carried(self._arch, name))
            return
        (entry,) = self._out.shards[name]
        rows = _Rows(self._out, [entry], 0, 0, entry.shape)
        same = self._source.entries()[name].num_bytes == entry.num_bytes
        self._note(name, name, same and self._same_bytes(rows, name, 0, read))

    def verdicts(self, in_source: int) -> list[Verdict]:
        """The findings."""
        over = [n for n in self._out.shards if n not in self._seen]
        missing = in_source - self._compared
        first = self._differing[0] if self._differing else f"{self._compared} tensors compared"
        return [
            Verdict.at_most("tensors that differ from the source", len(self._differing), 0, first),
            Verdict.at_most("tensors of the source that were not found", abs(missing), 0),
            Verdict.at_most("tensors that the source does not have", len(over), 0, *over[:1]),
        ]

    def _note(self, stored: str, name: str, same: bool) -> None:
        self._compared += 1
        self._seen.add(name)
        if not same:
            self._differing.append(stored)

    def _compare_bytes(
        self, part: _Part, name: str, shape: tuple[int, ...], stored: StoredTensor, read: ReadTensor
    ) -> None:
        shards = self._out.shards.get(name)
        if shards is None:
            self._differing.append(f"{stored.name} (not found)")
            return
        rows = _Rows(self._out, shards, part.number, len(stored.index), shape)
        same = {shard.dtype for shard in shards} == {self._source.entries()[stored.name].dtype}
        same &= self._same_bytes(rows, stored.name, 0, read)
        tail = self._out.shards.get(f"{name}.tail")
        if tail is not None:
            self._seen.add(f"{name}.tail")
            padding = _Rows(self._out, tail, 0, 0, tail[0].shape)
            same &= self._same_bytes(padding, stored.name, rows.rows * rows.item, read)
        self._note(stored.name, name, same)

    def _same_bytes(self, rows: _Rows, stored: str, start: int, read: ReadTensor) -> bool:
        pitch = rows.columns * rows.item
        each = max(1, _CHUNK_BYTES // max(1, pitch))
        same = True
        for first in range(0, rows.rows, each):
            last = min(first + each, rows.rows)
            count = (last - first) * pitch
            same &= rows.read(first, last) == read(stored, start + first * pitch, count)
            self._tell(stored, count)
        return same

    def _compare_values(self, part: _Part, name: str, dtype: str, read: ReadTensor) -> None:
        shards = self._out.shards.get(name)
        if shards is None:
            self._differing.append(f"{part.stored[0].name} (not found)")
            return
        by_form: dict[str, StoredTensor] = {tensor.transform: tensor for tensor in part.stored}
        leading = len(part.stored[0].index)
        rows = _Rows(self._out, shards, part.number, leading, part.shape)
        each = max(1, _CHUNK_BYTES // (8 * rows.columns))
        same = True
        for first in range(0, rows.rows, each):
            last = min(first + each, rows.rows)
            exact = _exact(by_form, dtype, range(first, last), rows.columns, read)
            raw = rows.read(first, last)
            same &= is_nearest(raw, shards[0].dtype, exact.reshape(-1))
            self._tell(name, len(raw))
        tail = f"{name}.tail"
        if tail in self._out.shards:
            self._seen.add(tail)
        for stored in part.stored:
            self._note(stored.name, name, same)

    def _tell(self, where: str, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(where, self._done, self._total)


def is_nearest(raw: bytes, dtype: str, exact: Floats) -> bool:
    """Whether stored elements are the exact values rounded to the nearest, ties to even.

    Args:
        raw: BF16 or F32 elements.
        dtype: safetensors dtype string.
        exact: what they stand for.

    >>> is_nearest(b"\\x80?", "BF16", np.array([1.001]))
    True
    >>> is_nearest(b"\\x80?", "BF16", np.array([1.01]))
    False
    """
    if len(raw) != exact.size * DTYPE_SIZES[dtype]:
        return False
    if dtype == "F32":
        return bool(np.array_equal(np.frombuffer(raw, np.float32).astype(np.float64), exact))
    bits = np.frombuffer(raw, np.uint16).astype(np.uint32)
    error = np.abs(_from_bf16(bits) - exact)
    # Neighbours by magnitude; below zero there is none, and zero's is the smallest number.
    above = np.abs(_from_bf16(bits + 1) - exact)
    below = np.where(bits & 0x7FFF, np.abs(_from_bf16(bits - (bits & 0x7FFF > 0)) - exact), np.inf)
    nearest = (error <= above) & (error <= below)
    tied = ((error == above) | (error == below)) & (error > 0)
    return bool((nearest & (~tied | (bits % 2 == 0))).all())


def _from_bf16(bits: NDArray[np.uint32]) -> Floats:
    return (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def _exact(
    by_form: dict[str, StoredTensor], dtype: str, rows: range, columns: int, read: ReadTensor
) -> Floats:
    """Values [rows, columns] that a part of the source stands for."""
    if "mxfp4_packed" in by_form:
        packed, scale = by_form["mxfp4_packed"], by_form["mxfp4_scale"]
        raw = np.frombuffer(_rows_of(packed, 1, rows, read), np.uint8)
        nibbles = np.stack((raw & 15, raw >> 4), -1).reshape(len(rows), -1, 32)
        size = np.array(_E2M1)[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
        power = np.frombuffer(_rows_of(scale, 1, rows, read), np.uint8).reshape(len(rows), -1, 1)
        found: Floats = size * 2.0 ** (power.astype(np.float64) - 127)
        return found.reshape(len(rows), columns)
    if "int4_packed" in by_form:
        packed, scale = by_form["int4_packed"], by_form["int4_scale"]
        raw = np.frombuffer(_rows_of(packed, 4, rows, read), np.uint8)
        signed = np.stack((raw & 15, raw >> 4), -1).reshape(len(rows), columns).astype(np.int64) - 8
        bits = np.frombuffer(_rows_of(scale, 2, rows, read), np.uint16).astype(np.uint32)
        factors = _from_bf16(bits).reshape(len(rows), -1)
        product: Floats = signed * factors[:, np.arange(columns) // scale.block[1]]
        return product
    if "fp8_values" in by_form:
        return _exact_fp8(by_form["fp8_values"], by_form["fp8_scale"], rows, columns, read)
    (stored,) = by_form.values()
    pitch = columns * DTYPE_SIZES[dtype]
    plain = read(stored.name, rows.start * pitch, len(rows) * pitch)
    if dtype == "BF16":
        return _from_bf16(np.frombuffer(plain, np.uint16).astype(np.uint32))
    kind = {"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]
    return np.frombuffer(plain, kind).astype(np.float64)


def _exact_fp8(
    values: StoredTensor, scale: StoredTensor, rows: range, columns: int, read: ReadTensor
) -> Floats:
    """A matrix in block-scaled E4M3: one product in float32 for each element."""
    code = np.frombuffer(_rows_of(values, 1, rows, read), np.uint8).astype(np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    signed = np.where(code & 128, -size, size).reshape(len(rows), columns).astype(np.float32)
    height, width = scale.block
    factors = np.frombuffer(_rows_of(scale, 4, range(scale.shape[0]), read), np.float32)
    factors = factors.reshape(scale.shape)
    row = np.arange(rows.start, rows.stop)[:, None] // height
    found: Floats = (signed * factors[row, np.arange(columns)[None] // width]).astype(np.float64)
    return found


def _rows_of(stored: StoredTensor, item: int, rows: range, read: ReadTensor) -> bytes:
    pitch = stored.shape[1] * item
    return read(stored.name, rows.start * pitch, len(rows) * pitch)


def _plain_reader(source: Source) -> ReadTensor:
    """Reads a released checkpoint past its own reader; a converted one has no other."""
    store = source.store if type(source) is Source else None

    def read(name: str, start: int, count: int) -> bytes:
        if store is None:
            return bytes(source.read(name, start, count))
        entry = source.entries()[name]
        return _plain_read(store, entry.file, entry.begin + start, count)

    return read


def _whole(store: FileStore, name: str) -> bytes:
    return _plain_read(store, name, 0, store.size(name) or 0)


def _plain_read(store: FileStore, name: str, offset: int, count: int) -> bytes:
    if not isinstance(store, LocalStore):
        return bytes(store.read_at(name, offset, count))
    try:
        with (Path(store.root) / name).open("rb") as handle:
            handle.seek(offset)
            return handle.read(count)
    except OSError as error:
        raise CheckpointError("TT301", f"{store.root}/{name}", f"cannot be read: {error}") from error
