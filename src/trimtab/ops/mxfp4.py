"""MXFP4: 4-bit floats (E2M1) with one power-of-two scale (E8M0) per 32 elements.

Layout of a row of `in` elements: byte j holds element 2j in its low nibble and 2j+1 in its high
nibble; a nibble is a sign bit and a magnitude index; scale byte b means 2^(b-127), 255 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbouring magnitudes. At a midpoint the even index wins, as in IEEE rounding.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAX_EXPONENT = 2  # 6.0 = 1.5 * 2^2


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of packed weights; exact in bfloat16 and wider.

    Args:
        packed: [..., in/2] uint8.
        scale: [..., in/32] uint8.
        dtype: floating dtype of the result.

    Returns:
        [..., in].
    """
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype)
    table = table.to(packed.device)
    nibbles = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    values = table[nibbles.long()].unflatten(-1, (-1, BLOCK))
    scaled: Tensor = values * _exponent_value(scale, dtype).unsqueeze(-1)
    return scaled.flatten(-2)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP4 form of `values`; a tensor already on the grid is encoded without loss.

    The scale is the smallest power of two that keeps the largest magnitude of a block within 6,
    so values on the grid come back unchanged whatever scale they had.

    Args:
        values: [..., in], in a multiple of 32, floating.

    Returns:
        packed [..., in/2] and scale [..., in/32], uint8.
    """
    blocks = values.detach().to(torch.float64).unflatten(-1, (-1, BLOCK))
    exponent = _block_exponent(blocks.abs().amax(-1))
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    index = torch.bucketize(scaled.abs(), _boundaries(scaled.device))
    index = _ties_to_even(scaled.abs(), index)
    nibble = (index + 8 * torch.signbit(scaled)).to(torch.uint8).flatten(-2)
    packed = nibble[..., 0::2] | (nibble[..., 1::2] << 4)
    return packed, (exponent + 127).to(torch.uint8)


def round_to_grid(values: Tensor) -> Tensor:
    """`decode(encode(values))` in the dtype of `values`."""
    packed, scale = encode(values)
    return decode(packed, scale, values.dtype)


def _exponent_value(scale: Tensor, dtype: torch.dtype) -> Tensor:
    value = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.int() - 127)
    return value.masked_fill(scale == 255, float("nan")).to(dtype)


def _block_exponent(amax: Tensor) -> Tensor:
    """Smallest e with amax <= 6 * 2^e, kept inside what one byte can say."""
    _, exponent = torch.frexp(amax / 6.0)  # amax/6 = m * 2^exponent, m in [0.5, 1)
    exact = torch.ldexp(torch.full_like(amax, 6.0), exponent - 1) >= amax
    exponent = torch.where(exact, exponent - 1, exponent)
    return torch.where(amax == 0, torch.zeros_like(exponent), exponent).clamp(-127, 127)


def _boundaries(device: torch.device) -> Tensor:
    return torch.tensor(_MIDPOINTS, dtype=torch.float64, device=device)


def _ties_to_even(magnitude: Tensor, index: Tensor) -> Tensor:
    # bucketize puts a value equal to a midpoint into the lower cell; odd lower cells go up.
    bounds = _boundaries(magnitude.device)
    on_tie = magnitude == bounds[index.clamp(max=len(_MIDPOINTS) - 1)]
    return torch.where(on_tie & (index % 2 == 1), index + 1, index)
