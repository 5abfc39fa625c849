"""INT4 in groups: signed 4-bit integers with one bfloat16 factor per group of a row.

    w[i, j] = (nibble[i, j] - 8) * scale[i, j // group]

Byte j of a row holds element 2j in its low nibble and 2j+1 in its high nibble; released files keep
four such bytes as one little-endian int32 (compressed-tensors, `pack-quantized`).
"""

from __future__ import annotations

import torch
from torch import Tensor

OFFSET = 8
# What the largest magnitude of a group may become: the ends of the range, halfway between them as
# min-max observers have it, and every smaller code, so that a group on any grid finds it again.
_DIVISORS = (8.0, 7.5, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of packed weights; exact in float32 and wider.

    Args:
        packed: [..., in/2] uint8.
        scale: [..., in/group] bfloat16.
        dtype: floating dtype of the result, rounded once.

    Returns:
        [..., in].
    """
    wide = torch.promote_types(dtype, torch.float32)
    nibbles = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    group = nibbles.shape[-1] // scale.shape[-1]
    codes = (nibbles.to(wide) - OFFSET).unflatten(-1, (-1, group))
    values: Tensor = codes * scale.to(wide).unsqueeze(-1)
    return values.flatten(-2).to(dtype)


def encode(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The INT4 form with the least squared error among a few scales per group.

    Values on the grid of some bfloat16 scale come back unchanged, if they are given in float32.

    Args:
        values: [..., in], in a multiple of `group`, floating and finite.
        group: elements that share a scale.

    Returns:
        packed [..., in/2] uint8 and scale [..., in/group] bfloat16. A group of zeros has scale 1.
    """
    groups = values.detach().to(torch.float64).unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1)
    best = torch.ones_like(largest)
    least = torch.full_like(largest, torch.inf)
    for divisor in _DIVISORS:
        scale = (largest / divisor).to(torch.float32).to(torch.bfloat16).to(torch.float64)
        usable = torch.where(scale == 0, torch.ones_like(scale), scale)
        error = (_codes(groups, usable) * usable.unsqueeze(-1) - groups).square().sum(-1)
        better = (error < least) & (scale != 0)
        best, least = torch.where(better, usable, best), torch.where(better, error, least)
    nibble = (_codes(groups, best) + OFFSET).to(torch.uint8).flatten(-2)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4), best.to(torch.bfloat16)


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale.unsqueeze(-1)).round().clamp(-8, 7)
