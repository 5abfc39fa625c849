"""Precision: where and how operators leave the activation dtype.

Knows: the upcast rule of dtype islands and matrix products in storage dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.custom import custom_op

# 4 MiB of float32: a block of an upcast weight stays in the cache of one core.
_BLOCK_ELEMENTS = 1 << 20


def island_dtype(x: Tensor) -> torch.dtype:
    """The dtype of an island that needs at least float32; float64 stays float64."""
    return torch.promote_types(x.dtype, torch.float32)


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products of activations like x run.

    A CPU multiplies bfloat16 about ten times slower than float32, so there it multiplies wider.
    """
    return island_dtype(x) if x.device.type == "cpu" else x.dtype


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with the weight in its storage dtype and the result in x's dtype.

    On a CPU bfloat16 rounds storage and activations and the product runs in float32. A weight of
    another dtype than the product's is upcast block by block, in the backward pass again, so that
    no second copy of it ever exists.

    Args:
        x: [..., in], compute dtype.
        weight: [out, in], any floating dtype.

    Returns:
        [..., out], dtype of x.
    """
    if x.device.type == "cpu" and not x.dtype is weight.dtype is operand_dtype(x):
        out: Tensor = upcast_linear_fwd(x, weight)
        return out
    return functional.linear(x, weight.to(x.dtype))


def upcast_workspace_bytes(shapes: Mapping[str, int]) -> int:
    """Bytes beside inputs and output that the upcast product takes, forward.

    Args:
        shapes: T rows, in, out.
    """
    t, width, out = shapes["T"], shapes["in"], shapes["out"]
    block = min(out, max(1, _BLOCK_ELEMENTS // width))
    return 4 * (block * width + t * (block + width))


@custom_op("trimtab::upcast_linear_fwd")
def upcast_linear_fwd(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in at least float32, the weight upcast block by block; x [..., in] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1]).to(island_dtype(x))
    out = x.new_empty(len(rows), len(weight))
    buffer = rows.new_empty(len(rows) * min(len(weight), _block_rows(weight)))
    for where, block in upcast_blocks(weight, rows.dtype, _block_rows(weight)):
        product = buffer[: len(rows) * len(block)].view(len(rows), len(block))
        out[:, where] = torch.mm(rows, block.mT, out=product)
    return out.view(*x.shape[:-1], len(weight))


@custom_op("trimtab::upcast_linear_bwd")
def upcast_linear_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; one that is not needed is empty, and x is read for the latter only."""
    dtype = island_dtype(grad)
    rows = grad.reshape(-1, len(weight))
    d_x = rows.new_zeros((len(rows) if need_x else 0, weight.shape[1]), dtype=dtype)
    d_weight = torch.empty_like(weight) if need_weight else weight.new_empty(0)
    wide = x.reshape(-1, weight.shape[1]).to(dtype) if need_weight else None
    for where, block in upcast_blocks(weight, dtype, _block_rows(weight)):
        part = rows[:, where].to(dtype)
        if need_x:
            d_x.addmm_(part, block)
        if wide is not None:
            d_weight[where] = part.mT @ wide
    d_x = d_x.to(grad.dtype)
    return d_x.view(*grad.shape[:-1], weight.shape[1]) if need_x else d_x, d_weight


def upcast_blocks(
    weight: Tensor, dtype: torch.dtype, step: int
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of `step` rows of a weight in `dtype`: views where that is its own, else one buffer.

    The buffer is used again for every block: freeing and allocating large blocks in turn grows the
    heap of the C library, which does not fit an aligned block into the hole that it left.
    """
    same = weight.dtype is dtype
    buffer = weight.new_empty((0 if same else min(step, len(weight)), weight.shape[1]), dtype=dtype)
    for start in range(0, len(weight), step):
        where = slice(start, min(start + step, len(weight)))
        block = weight[where]
        yield where, block if same else buffer[: len(block)].copy_(block)


def _block_rows(weight: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, weight.shape[1]))


@upcast_linear_fwd.register_fake
def _fake_fwd(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@upcast_linear_bwd.register_fake
def _fake_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    del x
    shape = (*grad.shape[:-1], weight.shape[1]) if need_x else (0, weight.shape[1])
    return grad.new_empty(shape), weight.new_empty(weight.shape if need_weight else 0)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    x, weight = inputs
    # A frozen weight needs x only for its own gradient, so x need not be kept.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else x.new_empty(0), weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad
    d_x, d_weight = upcast_linear_bwd(grad, x, weight, need_x, need_weight)
    return d_x if need_x else None, d_weight if need_weight else None


upcast_linear_fwd.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.trimtab.upcast_linear_fwd)
def _flops_fwd(x: tuple[int, ...], weight: tuple[int, int], **_: object) -> int:
    return 2 * _size(x) * weight[0]


@register_flop_formula(torch.ops.trimtab.upcast_linear_bwd)
def _flops_bwd(
    grad: tuple[int, ...], x: object, weight: tuple[int, int], need_x: bool, need_weight: bool,
    **_: object,
) -> int:
    del x
    return 2 * _size(grad) * weight[1] * (need_x + need_weight)


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
