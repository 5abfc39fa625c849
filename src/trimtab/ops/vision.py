"""Vision operators: position tables, two-axis rotary, attention inside each image, patch merging.

Shapes: N patches of all images, G images, H heads, K head dim, D width; a grid is (frames, rows,
columns) in patches and the patches of an image lie frame by frame, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.arch.spec import RopeSpec
from trimtab.ops.precision import island_dtype
from trimtab.ops.rope import inverse_frequencies

Grid = tuple[int, int, int]

_TIME_THETA = 10000.0


def resize_positions(table: Tensor, height: int, width: int) -> Tensor:
    """The learned grid of positions at another size: bilinear, half-pixel centres, no antialias.

    Args:
        table: [R, C, D].
        height: rows wanted.
        width: columns wanted.

    Returns:
        [height * width, D], row by row, in at least float32; the table itself at its own size.
    """
    wide = table.to(island_dtype(table))
    if tuple(table.shape[:2]) != (height, width):
        planes = wide.permute(2, 0, 1).unsqueeze(0)
        resized = functional.interpolate(
            planes, size=(height, width), mode="bilinear", align_corners=False, antialias=False
        )
        wide = resized.squeeze(0).permute(1, 2, 0)
    return wide.reshape(height * width, -1)


def time_table(frames: int, width: int, device: torch.device) -> Tensor:
    """Fixed positions of frames: the first half of a row is sin(f w_i), the second cos(f w_i).

    w_i = 10000^(-i / (width/2)).

    Returns:
        [frames, width] float64.
    """
    half = width // 2
    rates = _TIME_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(frames, dtype=torch.float64).unsqueeze(1) * rates
    return torch.cat((angles.sin(), angles.cos()), 1).to(device)


def rotary_angles(grid: Grid, head_dim: int, theta: float) -> Tensor:
    """Angle of every channel pair of every patch: even pairs turn with the column, odd with the row.

        pair 2i:   column * theta^(-4i / head_dim)
        pair 2i+1: row    * theta^(-4i / head_dim)

    Args:
        grid: frames, rows, columns; frames share their angles.
        head_dim: K, a multiple of 4.
        theta: base of the frequencies.

    Returns:
        [frames * rows * columns, K/2] float64 on the CPU.
    """
    frames, rows, columns = grid
    rates = theta ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    by_row = torch.arange(rows, dtype=torch.float64).unsqueeze(1) * rates
    by_column = torch.arange(columns, dtype=torch.float64).unsqueeze(1) * rates
    size = (rows, columns, len(rates))
    pairs = torch.stack((by_column.expand(size), by_row.unsqueeze(1).expand(size)), -1)
    return pairs.reshape(rows * columns, head_dim // 2).repeat(frames, 1)


def axial_angles(grid: Grid, head_dim: int, theta: float) -> Tensor:
    """Angle of every channel pair (c, c + K/2) of every patch: first rows, then columns.

        pair i:          row    * theta^(-4i / head_dim)      i < K/4
        pair K/4 + i:    column * theta^(-4i / head_dim)

    The frequencies are those of `ops.rope`, in float32.

    Args:
        grid: slices, rows, columns; slices share their angles.
        head_dim: K, a multiple of 4.
        theta: base of the frequencies.

    Returns:
        [slices * rows * columns, K/2] float64 on the CPU.
    """
    slices, rows, columns = grid
    quarter = head_dim // 4
    rates = inverse_frequencies(RopeSpec(theta), 2 * quarter).to(torch.float64)
    by_row = torch.arange(rows, dtype=torch.float64).unsqueeze(1) * rates
    by_column = torch.arange(columns, dtype=torch.float64).unsqueeze(1) * rates
    size = (rows, columns, quarter)
    angles = torch.cat((by_row.unsqueeze(1).expand(size), by_column.expand(size)), -1)
    return angles.reshape(rows * columns, 2 * quarter).repeat(slices, 1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent channel pairs (2p, 2p+1) as complex numbers, in at least float32.

    Args:
        x: [N, H, K].
        cos: [N, K/2].
        sin: [N, K/2].
    """
    dtype = island_dtype(x)
    real, imaginary = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
    return turned.flatten(-2).to(x.dtype)


def image_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: Sequence[int]
) -> Tensor:
    """Attention without a mask inside each image, and none across images.

    Images of the same length are computed together. On a CPU bfloat16 runs in float32, as
    matrix products do.

    Args:
        q: [N, H, K].
        k: [N, H, K].
        v: [N, H, V].
        scale: factor on the scores.
        lengths: patches per image, summing to N.

    Returns:
        [N, H, V] in the dtype of v.
    """
    dtype = island_dtype(v) if v.device.type == "cpu" else v.dtype
    q, k = q.to(dtype), k.to(dtype)
    wide = v.to(dtype)
    if len(set(lengths)) == 1:
        return _equal_images(q, k, wide, scale, lengths[0]).to(v.dtype)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    out = torch.empty_like(wide)
    for length in sorted(set(lengths)):
        first = [start for start, n in zip(starts, lengths, strict=False) if n == length]
        rows = torch.tensor(first, device=v.device).unsqueeze(1)
        rows = (rows + torch.arange(length, device=v.device)).flatten()
        part = _equal_images(q[rows], k[rows], wide[rows], scale, length)
        out = out.index_copy(0, rows, part)
    return out.to(v.dtype)


def _equal_images(q: Tensor, k: Tensor, v: Tensor, scale: float, length: int) -> Tensor:
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def merge_patches(x: Tensor, grids: Sequence[Grid], merge: tuple[int, int]) -> Tensor:
    """Lay the patches of each token side by side, averaged over frames.

    Tokens go row by row; inside a token its patches go row by row too.

    Args:
        x: [N, D].
        grids: one per image.
        merge: patches of a token along rows and columns.

    Returns:
        [tokens, merge rows * merge columns * D].
    """
    high, wide = merge
    merged, start = [], 0
    for frames, rows, columns in grids:
        count = frames * rows * columns
        image = x[start : start + count]
        start += count
        if frames > 1:
            stacked = image.unflatten(0, (frames, -1))
            image = stacked.to(island_dtype(x)).mean(0).to(x.dtype)
        blocks = image.view(rows // high, high, columns // wide, wide, -1)
        merged.append(blocks.transpose(1, 2).reshape(-1, high * wide * x.shape[-1]))
    return torch.cat(merged)
