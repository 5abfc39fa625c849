"""Grouped linear: rows sorted by expert, each slice times its expert's matrix.

    out[rows of e] = x[rows of e] W_e^T
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.precision import linear

# Gives expert e's matrix [out, in] in the dtype asked for.
ExpertMatrix = Callable[[int, torch.dtype], Tensor]


def grouped_linear_frozen(
    x: Tensor, counts: Sequence[int], out_features: int, matrix: ExpertMatrix
) -> Tensor:
    """Grouped linear with frozen matrices that are read one expert at a time.

    Args:
        x: [R, in], sorted by expert.
        counts: rows per expert, summing to R.
        out_features: width of the result.
        matrix: expert matrices, decoded on demand and again in the backward pass, so that no
            expanded copy of the experts is kept.

    Returns:
        [R, out].
    """
    out: Tensor = _GroupedFrozen.apply(x, counts, out_features, matrix)  # type: ignore[no-untyped-call]  # torch's
    return out


def grouped_linear(x: Tensor, counts: Sequence[int], weight: Tensor) -> Tensor:
    """Grouped linear with a trainable weight [E, out, in]."""
    out: Tensor = _Grouped.apply(x, counts, weight)  # type: ignore[no-untyped-call]  # torch's
    return out


def _slices(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Experts that have rows, with their rows."""
    found, begin = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(begin, begin + count)))
        begin += count
    return found


class _GroupedFrozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Sequence[int], out_features: int, matrix: ExpertMatrix
    ) -> Tensor:
        ctx.counts, ctx.matrix = counts, matrix
        out = x.new_empty(x.shape[0], out_features)
        for expert, rows in _slices(counts):
            out[rows] = linear(x[rows], matrix(expert, x.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0]
        dx: Tensor | None = None
        for expert, rows in _slices(ctx.counts):
            weight = ctx.matrix(expert, grad.dtype)
            if dx is None:
                dx = grad.new_empty(grad.shape[0], weight.shape[1])
            dx[rows] = linear(grad[rows], weight.mT)
        if dx is None:
            dx = grad.new_empty(0, ctx.matrix(0, grad.dtype).shape[1])
        return dx, None, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], weight: Tensor) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[1])
        for expert, rows in _slices(counts):
            torch.mm(x[rows], weight[expert].mT, out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        grad = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for expert, rows in _slices(ctx.counts):
            torch.mm(grad[rows], weight[expert], out=dx[rows])
            torch.mm(grad[rows].mT, x[rows], out=dw[expert])
        return dx, None, dw
