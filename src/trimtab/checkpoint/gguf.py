"""GGUF headers: what a file of that format holds. It is recognised, never loaded.

Knows: the layout of metadata and tensor table, the size of each block type. Does not know: torch,
what tensors mean, how blocks are decoded.

Layout, little-endian: magic, version, two counts, metadata as key-type-value, then per tensor its
name, dimensions, block type and offset.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from trimtab.errors import CheckpointError

MAGIC = b"GGUF"
_MAX_COUNT = 10_000_000
_MAX_STRING = 64 * 2**20
_STRING, _ARRAY = 8, 9
# Metadata type -> struct format of a scalar.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Block type -> name, elements of a block, bytes of a block.
_BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}

ReadAt = Callable[[int, int], bytes | bytearray]


@dataclass(frozen=True, slots=True)
class GGUFSummary:
    """Sums over the tensor table of one file.

    Args:
        architecture: `general.architecture` of the metadata, empty where it has none.
        num_tensors: tensors.
        parameters: their elements.
        num_bytes: their bytes, without padding.
        bytes_by_type: the same per block type.
    """

    architecture: str
    num_tensors: int
    parameters: int
    num_bytes: int
    bytes_by_type: dict[str, int]


def read_gguf(read_at: ReadAt, size: int, file: str) -> GGUFSummary:
    """Read the header of a GGUF file.

    Args:
        read_at: returns `length` bytes from `offset` of the file, fewer at its end.
        size: size of the file in bytes.
        file: name for messages.

    Raises:
        CheckpointError: TT301 if the header is damaged or of a version that is not known.
    """
    cursor = _Cursor(read_at, size, file)
    if cursor.take(4) != MAGIC:
        raise cursor.damaged("is no GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        raise cursor.damaged(f"version {version} is not known")
    tensors, pairs = cursor.count(), cursor.count()
    architecture = ""
    for _ in range(pairs):
        key, value = cursor.string(), cursor.value(cursor.number("I"))
        if key == "general.architecture" and isinstance(value, str):
            architecture = value
    parameters, sizes = 0, Counter[str]()
    for _ in range(tensors):
        cursor.string()
        shape = [cursor.number("Q") for _ in range(cursor.dimensions())]
        kind = cursor.number("I")
        cursor.number("Q")  # offset
        if kind not in _BLOCKS:
            raise cursor.damaged(f"block type {kind} is not known")
        name, elements, length = _BLOCKS[kind]
        parameters += prod(shape)
        sizes[name] += prod(shape) // elements * length
    return GGUFSummary(
        architecture, tensors, parameters, sizes.total(), dict(sizes.most_common())
    )


class _Cursor:
    """Reads a header from its start, some bytes at a time."""

    _STEP = 2**20

    def __init__(self, read_at: ReadAt, size: int, file: str) -> None:
        self._read_at, self._size, self._file = read_at, size, file
        self._start, self._at, self._buffer = 0, 0, b""  # the buffer holds bytes from `_start` on

    def damaged(self, rule: str) -> CheckpointError:
        """An error about the header."""
        return CheckpointError("TT301", self._file, rule, hint="copy or download the file again")

    def take(self, length: int) -> bytes:
        """The next bytes."""
        if self._at + length > len(self._buffer):
            self._start, self._at = self._start + self._at, 0
            wanted = min(max(length, self._STEP), self._size - self._start)
            self._buffer = bytes(self._read_at(self._start, max(wanted, 0)))
        found = self._buffer[self._at : self._at + length]
        if len(found) < length:
            raise self.damaged(f"ends within its header, at byte {self._size}")
        self._at += length
        return found

    def number(self, kind: str) -> int:
        """The next scalar of a struct format, as a whole number."""
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0])

    def count(self) -> int:
        """A number of items."""
        return self._bounded("Q", _MAX_COUNT)

    def dimensions(self) -> int:
        """The number of dimensions of a tensor."""
        return self._bounded("I", 8)

    def string(self) -> str:
        """The next string."""
        return self.take(self._bounded("Q", _MAX_STRING)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> str | None:
        """The next metadata value; only strings are kept."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.count()
            for _ in range(count):
                self.value(inner)
            return None
        if kind not in _SCALARS:
            raise self.damaged(f"metadata type {kind} is not known")
        self.take(struct.calcsize(f"<{_SCALARS[kind]}"))
        return None

    def _bounded(self, kind: str, most: int) -> int:
        found = self.number(kind)
        if found > most:
            raise self.damaged(f"a count of {found} is above the limit {most}")
        return found
