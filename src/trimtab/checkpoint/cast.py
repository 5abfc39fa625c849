"""Casting in numpy: rows of a part decoded from their stored form, rounded once to another dtype.

Knows: the stored forms as bytes. Does not know: torch, files. Conversions decode here so that they
need no torch; the tests hold every form against `ops`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trimtab.arch.stored import StoredTensor

Array: TypeAlias = NDArray[np.float32]
# Gives the rows of a stored tensor as bytes, in order.
ReadRows = Callable[[StoredTensor, range], memoryview]

_MXFP4_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CASTABLE = ("BF16", "F16", "F32")
QUANTISED = ("mxfp4", "fp8", "int4")


def family(stored: StoredTensor) -> str:
    """The stored form that a tensor belongs to, such as `mxfp4`; `plain` for all others."""
    head = stored.transform.partition("_")[0]
    return head if head in QUANTISED else "plain"


def decode_rows(
    of_part: dict[str, StoredTensor], rows: range, columns: int, read: ReadRows
) -> Array:
    """Rows of a quantised matrix.

    Args:
        of_part: the stored tensors that hold the part, by transform.
        rows: wanted rows of the part.
        columns: columns of the part.
        read: gives rows of a stored tensor.

    Returns:
        [len(rows), columns] float32.
    """
    if "mxfp4_packed" in of_part:
        packed = _bytes(read(of_part["mxfp4_packed"], rows)).reshape(len(rows), columns // 2)
        scale = _bytes(read(of_part["mxfp4_scale"], rows)).reshape(len(rows), -1)
        return _mxfp4(packed, scale)
    if "int4_packed" in of_part:
        packed = _bytes(read(of_part["int4_packed"], rows)).reshape(len(rows), columns // 2)
        factors = widen(read(of_part["int4_scale"], rows), "BF16").reshape(len(rows), -1)
        return _int4(packed, factors, of_part["int4_scale"].block[1])
    values, factor = of_part["fp8_values"], of_part["fp8_scale"]
    height, width = factor.block
    covered = range(rows.start // height, (rows.stop - 1) // height + 1)
    raw = _bytes(read(values, rows)).reshape(len(rows), columns)
    factors = np.frombuffer(read(factor, covered), np.float32).reshape(len(covered), -1)
    spread = factors[np.arange(rows.start, rows.stop) // height - covered.start]
    found: Array = _e4m3_table()[raw]
    found *= spread.repeat(width, axis=1)[:, :columns]
    return found


def widen(raw: memoryview, dtype: str) -> Array:
    """Plain elements as float32.

    >>> widen(memoryview(b"\\x80?"), "BF16").tolist()
    [1.0]
    """
    if dtype == "F32":
        return np.frombuffer(raw, np.float32)
    if dtype == "F16":
        return np.frombuffer(raw, np.float16).astype(np.float32)
    wide = np.frombuffer(raw, np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def narrow(values: Array, dtype: str) -> memoryview:
    """Bytes of finite values rounded to the nearest, ties to even.

    >>> bytes(narrow(np.ones(1, np.float32), "BF16"))
    b'\\x80?'
    """
    if dtype == "F32":
        return np.ascontiguousarray(values).data.cast("B")
    if dtype == "F16":
        return values.astype(np.float16).data.cast("B")
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> 16) & 1
    odd += bits
    odd += 0x7FFF
    odd >>= 16
    return odd.astype(np.uint16).data.cast("B")


def find_bad(block: memoryview, dtype: str, transform: str) -> int | None:
    """Place of the first element that is NaN, infinite or an invalid scale; None if all are good.

    Args:
        block: whole elements.
        dtype: safetensors dtype string.
        transform: of the stored tensor.
    """
    if transform == "mxfp4_scale":
        bad = _bytes(block) == 255
    elif dtype == "F8_E4M3":
        bad = (_bytes(block) & 0x7F) == 0x7F
    elif dtype in ("BF16", "F16"):
        mask = np.uint16(0x7F80 if dtype == "BF16" else 0x7C00)
        bad = (np.frombuffer(block, np.uint16) & mask) == mask
    elif dtype in ("F32", "F64"):
        bad = ~np.isfinite(np.frombuffer(block, np.float32 if dtype == "F32" else np.float64))
    else:
        return None
    return int(bad.argmax()) if bad.any() else None


def _mxfp4(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
    rows, half = packed.shape
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    table = np.array([*_MAGNITUDES, *(-size for size in _MAGNITUDES)], np.float32)
    pairs = np.stack((table[low], table[high]), -1)
    found: Array = pairs[packed].reshape(rows, -1, _MXFP4_BLOCK)
    found *= np.ldexp(np.float32(1), scale.astype(np.int32) - 127)[..., None]
    return found.reshape(rows, 2 * half)


def _int4(packed: NDArray[np.uint8], factors: Array, group: int) -> Array:
    """Nibble n means n - 8; the low nibble of a byte comes first."""
    rows, half = packed.shape
    table = np.arange(256)
    pairs = np.stack(((table & 15) - 8, (table >> 4) - 8), -1).astype(np.float32)
    found: Array = pairs[packed].reshape(rows, 2 * half)
    found *= factors.repeat(group, axis=1)[:, : 2 * half]
    return found


def _e4m3_table() -> Array:
    """The value of each E4M3 byte."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(
        exponent == 0, np.ldexp(mantissa.astype(np.float32), -9),
        np.ldexp((8 + mantissa).astype(np.float32), exponent - 10),
    )
    size = np.where((code & 0x7F) == 0x7F, np.float32("nan"), size)
    return np.where(code < 128, size, -size).astype(np.float32)


def _bytes(raw: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(raw, np.uint8)
