"""Block-scaled FP8 (E4M3): one factor per block of a matrix.

    w[i, j] = values[i, j] * scale[i // rows, j // columns]

The last block of a row or column may be cut off by the edge of the matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype

E4M3_MAX = 448.0
_NAN_BITS = 0x7F  # both signs; E4M3 has no infinity

Block = tuple[int, int]


def decode(values: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """The matrix.

    Args:
        values: [R, C] float8_e4m3fn.
        scale: [ceil(R / rows), ceil(C / columns)] float32.
        block: rows and columns of a block.
        dtype: of the result, rounded once from float32.

    Returns:
        [R, C].
    """
    return (values.to(scale.dtype) * _spread(scale, block, values.shape)).to(dtype)


def encode(matrix: Tensor, block: Block, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """The nearest values under the smallest scales that keep each block within range.

    Args:
        matrix: [R, C], floating.
        block: rows and columns of a block.
        power_of_two: scales are rounded up to powers of two.

    Returns:
        Values [R, C] float8_e4m3fn and scales [ceil(R / rows), ceil(C / columns)] float32. A block
        of zeros has scale 1.
    """
    wide = matrix.to(island_dtype(matrix))
    rows, columns = block
    height, width = -(-wide.shape[0] // rows), -(-wide.shape[1] // columns)
    padded = wide.new_zeros(height * rows, width * columns)
    padded[: wide.shape[0], : wide.shape[1]] = wide
    largest = padded.view(height, rows, width, columns).abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        # 2^e is above every m 2^e with m in [0.5, 1), and m = 0.5 is a power of two itself.
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    scale = scale.to(torch.float32)
    scaled = wide / _spread(scale.to(wide.dtype), block, wide.shape)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def is_nan(values: Tensor) -> Tensor:
    """[...] bool: elements that are NaN, which torch cannot ask of float8 itself."""
    return (values.view(torch.uint8) & _NAN_BITS) == _NAN_BITS


def _spread(scale: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """Scales repeated over their blocks, cut to the matrix."""
    rows, columns = block
    full = scale.repeat_interleave(rows, 0)[: shape[0]]
    return full.repeat_interleave(columns, 1)[:, : shape[1]]
