"""Dropout masks without random state: a pure function of key, token and feature.

Any layout, and recomputation, therefore sees the same mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 1 << 64
# Odd 64-bit constants for mixing; any odd constants with well spread bits do.
_MIX_EXPERT = 0xDA942042E4DD58B5
_MIX_TOKEN, _MIX_FEATURE, _MIX_1, _MIX_2 = (
    c - _WORD
    for c in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_MASK_BITS = 24


def keep_mask(token_ids: Tensor, features: int, key: int, rate: float) -> Tensor:
    """[T, features] bool, False with probability `rate`, a pure function of its arguments.

    Args:
        token_ids: [T] int64, global token numbers.
        features: width.
        key: of module and step, within int64.
        rate: dropout probability.
    """
    feature = torch.arange(features, device=token_ids.device)
    h = token_ids.unsqueeze(1) * _MIX_TOKEN + (feature * _MIX_FEATURE + key)
    for factor in (_MIX_1, _MIX_2):
        h = (h ^ ((h >> 31) & 0x1FFFFFFFF)) * factor
    uniform = (h >> (63 - _MASK_BITS)) & ((1 << _MASK_BITS) - 1)
    return uniform >= least_kept(rate)


def least_kept(rate: float) -> int:
    """The smallest of the 2^24 hash values whose element is kept."""
    return round(rate * (1 << _MASK_BITS))


def expert_key(key: int, expert: int) -> int:
    """The key of one expert of a layer, within int64."""
    word = (key + expert * _MIX_EXPERT) % _WORD
    return word - _WORD if word >= _WORD // 2 else word
