"""Short causal depthwise convolution with SiLU, per sequence of a pack.

    y_t[c] = SiLU( sum_j w[c, j] x_{t - (k-1) + j}[c] ),  zeros (or the given tail) before the start
"""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Convolve a pack whose sequences start from nothing.

    Args:
        x: [T, P], before the convolution.
        weight: [P, 1, k]; the last tap multiplies the current token.
        positions: [T] int, index of each token in its sequence.

    Returns:
        [T, P] in the dtype of x.
    """
    taps = weight.to(x.dtype)[:, 0]
    kernel = taps.shape[1]
    out = x * taps[:, -1]
    for back in range(1, min(kernel, x.shape[0] + 1)):
        keep = (positions[back:] >= back).to(x.dtype).unsqueeze(-1)
        shifted = x[:-back] * (taps[:, kernel - 1 - back] * keep)
        out = out + torch.nn.functional.pad(shifted, (0, 0, back, 0))
    return torch.nn.functional.silu(out)


def short_conv_cached(
    x: Tensor, weight: Tensor, tail: Tensor, positions: Tensor, sequence_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve tokens that continue sequences.

    Args:
        x: [T, P], new tokens of N sequences, one after the other.
        weight: [P, 1, k].
        tail: [N, k-1, P], the inputs before the first new token, oldest first.
        positions: [T], index of each new token among the new tokens of its sequence.
        sequence_ids: [T], 0..N-1.

    Returns:
        [T, P], and the new tail [N, k-1, P].
    """
    taps = weight.to(x.dtype)[:, 0]
    depth = taps.shape[1] - 1
    n = tail.shape[0]
    history = torch.cat((x, tail.to(x.dtype).flatten(0, 1)))
    rows = torch.arange(x.shape[0], device=x.device)
    out = x * taps[:, -1]
    for back in range(1, depth + 1):
        source = torch.where(
            positions >= back,
            rows - back,
            x.shape[0] + sequence_ids * depth + depth - back + positions,
        )
        out = out + history[source] * taps[:, depth - back]
    lengths = torch.bincount(sequence_ids, minlength=n)
    ends = torch.cumsum(lengths, 0)
    steps = torch.arange(depth, device=x.device)
    from_end = depth - steps  # 'from_end' tokens back from the end of each sequence
    have = lengths.unsqueeze(1) >= from_end
    source = torch.where(
        have,
        ends.unsqueeze(1) - from_end,
        x.shape[0] + torch.arange(n, device=x.device).unsqueeze(1) * depth
        + (lengths.unsqueeze(1) + steps).clamp(max=depth - 1),
    )
    return torch.nn.functional.silu(out), history[source]
