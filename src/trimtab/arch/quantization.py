"""Quantisation: the stored form of most matrices of a release, as its config declares it.

Knows: which tensors hold one matrix, and which modules are left out. Does not know: how a config
spells it (see `readers.quantization`), how values are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PackedKind = Literal["mxfp4", "fp8", "int4"]


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How the elements of a matrix are packed: 4-bit or 8-bit values, one scale per block.

    Args:
        kind: `mxfp4` (E2M1 values, E8M0 scales), `fp8` (E4M3, F32), `int4` (-8 to 7, BF16).
        block: rows and columns that share a scale.
        power_of_two: FP8 scales are rounded up to powers of two when written.
    """

    kind: PackedKind
    block: tuple[int, int]
    power_of_two: bool = False

    @property
    def per_byte(self) -> int:
        """Elements in a byte, scales not counted."""
        return 1 if self.kind == "fp8" else 2


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that together hold a quantised matrix [rows, columns].

    Args:
        suffix: what follows the released module name, such as `.weight_scale_inv`.
        dtype: safetensors dtype string.
        per_row: rows that one row of this tensor stands for, rounded up.
        per_column: columns that one column stands for, rounded up.
        kind: `values` hold the elements, `scale` does not; `scalar` is one number for the matrix,
            `shape` its two sizes.
    """

    suffix: str
    dtype: str
    per_row: int = 1
    per_column: int = 1
    kind: Literal["values", "scale", "scalar", "shape"] = "values"

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that one element stands for."""
        return self.per_row, self.per_column

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Stored shape for a matrix of this size.

        >>> StoredPart(".weight_scale_inv", "F32", 128, 128, "scale").shape(576, 7168)
        (5, 56)
        """
        if self.kind == "scalar":
            return ()
        if self.kind == "shape":
            return (2,)
        return (-(-rows // self.per_row), -(-columns // self.per_column))


@dataclass(frozen=True, slots=True)
class Quantization:
    """A stored form of most matrices of a release, declared by its config.

    Args:
        name: as users know it, such as `FP8` or `NVFP4`.
        parts: the tensors of one matrix, `values` first.
        keeps: modules left in the model's dtype, beside those the family never quantises:
            released names (and all below them), shell patterns, or regular expressions after `re:`.
        readable: Trimtab decodes and encodes it; else it is only recognised.
        power_of_two_scales: scales are rounded up to powers of two when written.
    """

    name: str
    parts: tuple[StoredPart, ...]
    keeps: tuple[str, ...] = ()
    readable: bool = False
    power_of_two_scales: bool = False
