"""Products of sorted rows with the MXFP4 matrices of their experts, adapters included.

    y_n = W_e x_n + scaling B_e (A_e x_n)          rows of expert e lie one after the other

Weights stay packed in memory and are decoded tile by tile in registers. Byte j of a row holds the
elements 2j and 2j+1, so a product is two: of even columns with low nibbles, of odd ones with high.

Letters: R rows, E experts, N out, D in, r rank (0 without an adapter).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.ops.custom import custom_op
from trimtab.ops.triton.common import product

_ROWS = 16
_OUT = 32
_BYTES = 32  # of a packed row at a time: 64 elements, two scales


@triton.jit
def _value(code):
    """An E2M1 code in float32: sign, then 0, .5, 1, 1.5, 2, 3, 4, 6."""
    index = code & 7
    exponent = ((index >> 1) - 1).to(tl.float32)
    normal = (1.0 + 0.5 * (index & 1).to(tl.float32)) * tl.exp2(exponent)
    magnitude = tl.where(index < 2, 0.5 * index.to(tl.float32), normal)
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _decode(packed, scale, row, byte, N, D):
    """Even and odd elements [rows, bytes] of one expert's matrix, zero outside of it."""
    inside = (row < N) & (byte < D // 2)
    code = tl.load(packed + row.to(tl.int64) * (D // 2) + byte, mask=inside, other=0).to(tl.int32)
    # 16 bytes share a scale, a power of two; 255 says that the block is not a number.
    power = tl.load(scale + row.to(tl.int64) * (D // 32) + byte // 16, mask=inside, other=127).to(tl.int32)
    factor = tl.where(power == 255, float("nan"), tl.exp2((power - 127).to(tl.float32)))
    return _value(code & 15) * factor, _value(code >> 4) * factor


@triton.jit
def _pair(x, row, column, inside):
    """Elements 2c and 2c+1 of rows of x, whose addresses begin at `row`."""
    even = tl.load(x + row + 2 * column, mask=inside, other=0.0).to(tl.float32)
    return even, tl.load(x + row + 2 * column + 1, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x, packed, scale, A, B, y, tiles, scaling, N, D, r, NARROW: tl.constexpr, LORA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):
    tile, out = tiles + 3 * tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    expert, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    row, rank = tl.arange(0, BM), tl.arange(0, BR)
    start = (first + row).to(tl.int64)[:, None] * D
    acc = tl.zeros((BM, BN), tl.float32)
    low = tl.zeros((BM, BR), tl.float32)
    for c in range(0, D // 2, BC):
        byte = c + tl.arange(0, BC)
        exists = byte[None, :] < D // 2
        xe, xo = _pair(x, start, byte[None, :], (row[:, None] < count) & exists)
        we, wo = _decode(
            packed + expert * N * (D // 2), scale + expert * N * (D // 32), out[:, None], byte[None, :], N, D
        )
        acc += product(xe, tl.trans(we), NARROW) + product(xo, tl.trans(wo), NARROW)
        if LORA:
            at = expert * r * D + rank[:, None].to(tl.int64) * D
            ae, ao = _pair(A, at, byte[None, :], (rank[:, None] < r) & exists)
            low += product(xe, tl.trans(ae), NARROW) + product(xo, tl.trans(ao), NARROW)
    if LORA:
        where = B + (expert * N + out[:, None]) * r + rank[None, :]
        b = tl.load(where, mask=(out[:, None] < N) & (rank[None, :] < r), other=0.0).to(tl.float32)
        acc += scaling * product(low, tl.trans(b), NARROW)
    inside = (row[:, None] < count) & (out[None, :] < N)
    where = y + (first + row).to(tl.int64)[:, None] * N + out[None, :]
    tl.store(where, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy, packed, scale, A, B, dx, tiles, scaling, N, D, r, NARROW: tl.constexpr,
    LORA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):
    tile, byte = tiles + 3 * tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    expert, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    row, rank = tl.arange(0, BM), tl.arange(0, BR)
    even, odd = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    low = tl.zeros((BM, BR), tl.float32)
    for n in range(0, N, BN):
        out = n + tl.arange(0, BN)
        where = dy + (first + row).to(tl.int64)[:, None] * N + out[None, :]
        g = tl.load(where, mask=(row[:, None] < count) & (out[None, :] < N), other=0.0).to(tl.float32)
        we, wo = _decode(
            packed + expert * N * (D // 2), scale + expert * N * (D // 32), out[:, None], byte[None, :], N, D
        )
        even += product(g, we, NARROW)
        odd += product(g, wo, NARROW)
        if LORA:
            where = B + (expert * N + out[:, None]) * r + rank[None, :]
            b = tl.load(where, mask=(out[:, None] < N) & (rank[None, :] < r), other=0.0)
            low += product(g, b.to(tl.float32), NARROW)
    exists = byte[None, :] < D // 2
    if LORA:
        at = expert * r * D + rank[:, None].to(tl.int64) * D
        ae, ao = _pair(A, at, byte[None, :], (rank[:, None] < r) & exists)
        even += scaling * product(low, ae, NARROW)
        odd += scaling * product(low, ao, NARROW)
    inside = (row[:, None] < count) & exists
    where = dx + (first + row).to(tl.int64)[:, None] * D + 2 * byte[None, :]
    tl.store(where, even.to(dx.dtype.element_ty), mask=inside)
    tl.store(where + 1, odd.to(dx.dtype.element_ty), mask=inside)


@custom_op("trimtab::mxfp4_grouped_fwd")
def mxfp4_grouped_fwd(
    x: Tensor, packed: Tensor, scale: Tensor, A: Tensor, B: Tensor, counts: Sequence[int],
    scaling: float,
) -> Tensor:
    """y [R, N] in the dtype of x.

    Args:
        x: [R, D], D a multiple of 32.
        packed: [E, N, D/2] uint8.
        scale: [E, N, D/32] uint8.
        A: [E, r, D], or empty.
        B: [E, N, r], or empty.
        counts: rows of each expert, E numbers that sum to R.
        scaling: factor on the adapter.
    """
    x = x.contiguous()
    out = packed.shape[1]
    y = x.new_empty(len(x), out)
    tiles = _tiles(counts, x.device)
    if len(tiles):
        _forward_kernel[(len(tiles), triton.cdiv(out, _OUT))](
            x, packed, scale, A.contiguous(), B.contiguous(), y, tiles, scaling,
            *_constants(x, packed, A),
        )
    return y


@custom_op("trimtab::mxfp4_grouped_bwd")
def mxfp4_grouped_bwd(
    dy: Tensor, x: Tensor, packed: Tensor, scale: Tensor, A: Tensor, B: Tensor,
    counts: Sequence[int], scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and B; the base is frozen."""
    dy = dy.contiguous()
    dx, d_a, d_b = torch.empty_like(x), torch.zeros_like(A), torch.zeros_like(B)
    tiles = _tiles(counts, x.device)
    if len(tiles):
        _backward_kernel[(len(tiles), triton.cdiv(x.shape[1] // 2, _BYTES))](
            dy, packed, scale, A.contiguous(), B.contiguous(), dx, tiles, scaling,
            *_constants(x, packed, A),
        )
    if A.numel():
        parts = (part.to(A.dtype).split(list(counts)) for part in (x, dy))
        for e, (rows, grad) in enumerate(zip(*parts, strict=True)):
            d_a[e] = scaling * ((grad @ B[e]).mT @ rows)
            d_b[e] = scaling * (grad.mT @ (rows @ A[e].mT))
    return dx, d_a, d_b


def _tiles(counts: Sequence[int], device: torch.device) -> Tensor:
    """[tiles, 3] int32: expert, first row, rows of each block of rows."""
    found, first = [], 0
    for expert, count in enumerate(counts):
        found += [(expert, first + at, min(_ROWS, count - at)) for at in range(0, count, _ROWS)]
        first += count
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 3).to(device)


def _constants(x: Tensor, packed: Tensor, A: Tensor) -> tuple[int | bool, ...]:
    rank = A.shape[1] if A.numel() else 0
    narrow = x.dtype is torch.bfloat16 and x.device.type == "cuda"
    block = max(16, triton.next_power_of_2(max(1, rank)))
    return packed.shape[1], x.shape[1], rank, narrow, rank > 0, _ROWS, _OUT, _BYTES, block


@mxfp4_grouped_fwd.register_fake
def _(
    x: Tensor, packed: Tensor, scale: Tensor, A: Tensor, B: Tensor, counts: Sequence[int],
    scaling: float,
) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[1])


@mxfp4_grouped_bwd.register_fake
def _(
    dy: Tensor, x: Tensor, packed: Tensor, scale: Tensor, A: Tensor, B: Tensor,
    counts: Sequence[int], scaling: float,
) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (x, A, B))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.counts, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, d_a, d_b = mxfp4_grouped_bwd(dy, *ctx.saved_tensors, ctx.counts, ctx.scaling)
    return dx, None, None, d_a, d_b, None, None


mxfp4_grouped_fwd.register_autograd(_backward, setup_context=_setup)
