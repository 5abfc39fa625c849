"""Cross-entropy over a large vocabulary without keeping all logits.

    loss = sum_r ( logsumexp(W h_r) - (W h_r)[label_r] )
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype, linear


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Reference: sum of the token losses.

    Args:
        hidden: [R, D].
        weight: [W, D], the output head.
        labels: [R] int64, all within 0..W-1.

    Returns:
        Scalar in at least float32.
    """
    logits = linear(hidden, weight)
    return torch.nn.functional.cross_entropy(
        logits.to(island_dtype(logits)), labels, reduction="sum"
    )


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 1024
) -> Tensor:
    """`cross_entropy` with the logits of at most `chunk` rows alive at a time.

    The gradient of the hidden rows is computed in the forward pass and scaled in the backward
    pass, so logits are never computed twice. The head is frozen here: where it needs a gradient
    the reference runs instead.

    Args:
        hidden: [R, D].
        weight: [W, D].
        labels: [R] int64.
        chunk: rows per block.
    """
    if weight.requires_grad:
        return cross_entropy(hidden, weight, labels)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk)  # type: ignore[no-untyped-call]  # torch's
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        dtype = island_dtype(hidden)
        head = weight.to(dtype)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        grad = torch.empty_like(hidden) if hidden.requires_grad else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            target = labels[rows].unsqueeze(1)
            logits = linear(hidden[rows], head).to(dtype)
            norm = torch.logsumexp(logits, 1, keepdim=True)
            total += (norm - logits.gather(1, target)).sum()
            if grad is not None:
                prob = torch.exp(logits - norm)
                prob.scatter_add_(1, target, torch.full_like(norm, -1.0))
                grad[rows] = (prob @ head).to(hidden.dtype)
        if grad is not None:
            ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None
