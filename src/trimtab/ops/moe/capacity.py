"""A limit on the tokens of one expert: what is over it is dropped, in token order.

    capacity = ceil(factor * T * A / E)        T without padding

A dropped choice is one of no expert; the other weights of its token stay as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimtab.ops.checks import check_mask, check_shape, require


def capacity_of(factor: float, tokens: int, active: int, experts: int) -> int:
    """Most tokens of one expert."""
    return math.ceil(factor * tokens * active / experts)


@torch.no_grad()
def drop_beyond(
    ids: Tensor, experts: int, factor: float, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choices within the capacity.

    Args:
        ids: [T, A] int64, experts of each token.
        experts: E.
        factor: capacity over the mean load.
        valid: [T] bool, False for padding, which takes no place and reaches no expert.

    Returns:
        ids [T, A] with E in place of what is dropped, and dropped tokens per expert [E], without
        padding.

    Raises:
        OperatorError: TT111, a shape or dtype is wrong, or the factor is not positive.
    """
    check_shape("capacity.ids", ids, "T A")
    require(ids.dtype is torch.int64, "capacity.ids", "must be int64", ids.dtype)
    require(factor > 0, "capacity.factor", "must be positive", factor)
    if valid is not None:
        check_mask("capacity.valid", valid, len(ids))
    real = ids if valid is None else ids.masked_fill(~valid.unsqueeze(-1), experts)
    tokens = len(ids) if valid is None else int(valid.sum())
    capacity = capacity_of(factor, tokens, ids.shape[1], experts)
    flat = real.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)
    begins = torch.cumsum(counts, 0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(flat), device=ids.device) - begins[flat[order]]
    kept = flat.masked_fill(place >= capacity, experts)
    return kept.view(ids.shape), (counts[:experts] - capacity).clamp(min=0)
