"""Rotary position embedding: frequencies with or without YaRN, tables, two channel layouts.

    angle[t, i] = position_t * f_i ;  f_i = theta^(-2i / K)
    YaRN: f_i <- f_i / factor for slow channels, unchanged for fast ones, a linear ramp between

Frequencies are float32 constants of the release; the same steps in the same order give the same
bits everywhere, which matters because positions multiply their rounding. Angles are taken in at
least float32.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trimtab.arch.spec import RopeSpec
from trimtab.ops.precision import island_dtype

Layout = Literal["interleaved", "half"]


def inverse_frequencies(spec: RopeSpec, width: int, device: torch.device | str = "cpu") -> Tensor:
    """[width/2] float32, one frequency per channel pair.

    Args:
        spec: base and YaRN constants.
        width: rotated channels, even.
        device: of the result.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    periods = spec.theta**exponents
    if spec.yarn_factor is None:
        return 1.0 / periods
    low, high = yarn_range(spec, width)
    steps = torch.arange(width // 2, dtype=torch.float32, device=device)
    slow = ((steps - low) / (high - low)).clamp(0, 1)
    fast = 1 - slow
    return 1.0 / (spec.yarn_factor * periods) * (1 - fast) + 1.0 / periods * fast


def yarn_range(spec: RopeSpec, width: int) -> tuple[float, float]:
    """Channel pairs between which the ramp runs: below, full turns are kept; above, stretched.

    >>> yarn_range(RopeSpec(10000.0, yarn_factor=40.0), 64)
    (10, 23)
    """

    def channel(turns: float) -> float:
        distance = spec.yarn_original / (turns * 2 * math.pi)
        return width * math.log(distance) / (2 * math.log(spec.theta))

    low = max(math.floor(channel(spec.yarn_beta_fast)), 0)
    high = min(math.ceil(channel(spec.yarn_beta_slow)), width - 1)
    return low, high if high != low else high + 0.001


def rope_tables(
    positions: Tensor, spec: RopeSpec, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position.

    Args:
        positions: [T] int64, counted from the start of each sequence.
        spec: base and YaRN constants.
        width: rotated channels, even.
        dtype: of the angles and the result; at least float32.

    Returns:
        Two tensors [T, width/2].
    """
    frequencies = inverse_frequencies(spec, width, positions.device).to(dtype)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies
    return angles.cos() * spec.amplitude, angles.sin() * spec.amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn channel pairs in at least float32.

    `interleaved` pairs channels (2i, 2i+1), `half` pairs (i, i + K/2). Either way the result lies
    in halves, all first channels before all second: only products of two rotated vectors are
    taken, and those do not depend on the order.

    Args:
        x: [T, ..., K].
        cos: [T, K/2].
        sin: [T, K/2].
        layout: which channels form a pair.

    Returns:
        The shape and dtype of x.
    """
    wide = x.to(island_dtype(x))
    if layout == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, -1)
    shape = (cos.shape[0], *[1] * (x.dim() - 2), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


def rotate_head(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn the first channels of x, as many as the tables cover, and keep the rest.

    Args:
        x: [T, ..., K].
        cos: [T, P/2] with P <= K.
        sin: [T, P/2].
        layout: which channels form a pair.
    """
    turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    return torch.cat((rotate(turned, cos, sin, layout), rest), -1)
