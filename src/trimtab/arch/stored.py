"""StoredTensor: how a parameter lies in the released files.

Knows: the invertible rules between a ParamSpec and stored tensors. Does not know: torch; the
rules are executed by `checkpoint`. One table of rules per family stands in `maps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transform = Literal[
    "same", "reshape", "pad_tail", "mxfp4_packed", "mxfp4_scale", "fp8_values", "fp8_scale",
    "int4_packed", "int4_scale", "int4_shape",
    "foreign_values", "foreign_scale",
]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a released file, and the part of a parameter it fills.

    The parameter's part `param[index]` equals the decoded stored tensor:

    - `same`: the stored tensor itself.
    - `reshape`: the same elements in another shape.
    - `pad_tail`: the first `prod(param[index].shape)` elements; the tail is zero when written.
    - `mxfp4_packed` / `mxfp4_scale`: nibbles [out, in/2] and block exponents [out, in/32].
    - `fp8_values` / `fp8_scale`: F8_E4M3 elements [out, in] and one F32 factor per block.
    - `int4_packed` / `int4_scale` / `int4_shape`: nibbles [out, in/8] as I32, one BF16 factor per
      group, and the two sizes of the matrix.
    - `foreign_values` / `foreign_scale`: a form that is recognised and cannot be read.

    Args:
        name: released name.
        shape: stored shape.
        dtype: safetensors dtype string (BF16, F32, U8, I32, F8_E4M3).
        param: fully qualified name of the parameter it fills.
        index: leading indices into the parameter, such as (expert, 0) for a gate matrix.
        transform: how stored elements relate to the part.
        block: rows and columns that one element stands for, of a scale.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    param: str
    index: tuple[int, ...] = ()
    transform: Transform = "same"
    block: tuple[int, int] = (1, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        total = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            total *= size
        return total


DTYPE_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E8M0": 1,
}
