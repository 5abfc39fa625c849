"""Safetensors headers: which tensors a file holds and where their bytes lie.

Knows: the layout of a safetensors file and every rule a valid one keeps.
Does not know: torch, where files come from, what the tensors mean.

Layout: 8 bytes little-endian header length N, N bytes JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000

DTYPE_SIZES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}

ReadAt = Callable[[int, int], bytes | bytearray]


class Described(Protocol):
    """What a header says of a tensor: safetensors dtype, shape, and the bytes they need."""

    @property
    def name(self) -> str:
        """As in the file."""

    @property
    def dtype(self) -> str:
        """Safetensors dtype string."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Args:
        dtype: safetensors dtype string, such as BF16.
        shape: sizes, empty for a scalar.
        file: file name relative to the source's directory.
        begin: absolute offset of the first byte in the file.
        end: absolute offset behind the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


def read_header(read_at: ReadAt, size: int, file: str) -> dict[str, TensorEntry]:
    """Read and check the header of one safetensors file.

    Args:
        read_at: returns `length` bytes from `offset` of the file, fewer at its end.
        size: size of the whole file in bytes.
        file: name for messages and for the entries.

    Returns:
        Tensor name to entry, in file order.

    Raises:
        CheckpointError: TT301 if the file is truncated or the header breaks a rule, TT308 if a
            name occurs twice.
    """
    if size < 8:
        raise _damaged(file, f"a header length of 8 bytes is needed, the file has {size} bytes")
    (length,) = struct.unpack("<Q", read_at(0, 8))
    if length > MAX_HEADER_BYTES:
        raise _damaged(file, f"header length {length} is above the limit {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise _damaged(file, f"header needs {8 + length} bytes, the file has {size}")
    header = _parse_json(bytes(read_at(8, length)), file)
    header.pop("__metadata__", None)
    entries = {n: _entry(n, spec, 8 + length, file) for n, spec in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_contiguous(ordered, 8 + length, size, file)
    return ordered


def read_header_file(path: Path, file: str | None = None) -> dict[str, TensorEntry]:
    """`read_header` of a local file; `file` is its name in messages, `path.name` if not given."""
    with path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size

        def read_at(offset: int, length: int) -> bytes:
            handle.seek(offset)
            return handle.read(length)

        return read_header(read_at, size, file or path.name)


def _damaged(file: str, rule: str, value: object = None) -> CheckpointError:
    hint = "copy or download the file again and compare its size with the source"
    return CheckpointError("TT301", file, rule, value=value, hint=hint)


def _parse_json(raw: bytes, file: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise CheckpointError("TT308", f"{file}: {twice}", "stands twice in one header")
        return seen

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _damaged(file, f"header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(file, f"header must be a JSON object, found {type(header).__name__}")
    return header


def _entry(name: str, spec: object, data_start: int, file: str) -> TensorEntry:
    where = f"{file}: {name}"
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(where, "must have exactly dtype, shape and data_offsets", spec)
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZES:
        raise _damaged(where, f"dtype must be one of {', '.join(DTYPE_SIZES)}", dtype)
    if not _is_sizes(shape):
        raise _damaged(where, "shape must be a list of integers of at least 0", shape)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(where, "data_offsets must be [begin, end] with 0 <= begin <= end", offsets)
    needed = DTYPE_SIZES[dtype]
    for extent in shape:
        needed *= extent
    if offsets[1] - offsets[0] != needed:
        found = offsets[1] - offsets[0]
        raise _damaged(where, f"{dtype} {shape} needs {needed} bytes, data_offsets span {found}")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    return TensorEntry(dtype, tuple(shape), file, begin, end)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_contiguous(
    entries: dict[str, TensorEntry], data_start: int, size: int, file: str
) -> None:
    position = data_start
    for name, entry in entries.items():
        if entry.begin != position:
            rule = f"must begin at byte {position}, begins at {entry.begin}; gaps and overlaps"
            raise _damaged(f"{file}: {name}", f"{rule} are not allowed")
        position = entry.end
    if position != size:
        word = "truncated" if size < position else "too long"
        raise _damaged(file, f"file is {word}: expected {position} bytes, found {size}")


def header_bytes(tensors: Iterable[Described], alignment: int = 8) -> bytes:
    """Length and JSON of a file that holds these tensors in this order, without gaps.

    Args:
        tensors: all of the file.
        alignment: the data begins at a multiple of it.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    return struct.pack("<Q", len(text)) + text
