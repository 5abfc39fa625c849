"""How tests measure a difference."""

from __future__ import annotations

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude expected; 0 where both are all zero."""
    wide = expected.detach().double()
    difference = (found.detach().double() - wide).abs().max() if wide.numel() else wide.sum()
    scale = wide.abs().max() if wide.numel() else wide.sum()
    return float(difference) if float(scale) == 0 else float(difference / scale)
