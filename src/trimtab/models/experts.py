"""Weights of routed experts in a floating dtype; packed ones are `packed.PackedWeight`.

Both give one expert's matrix at a time, so that the packed form is never expanded as a whole.
Letters: E experts, F FFN width, D width the experts work on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.ops.moe.grouped import grouped_linear, grouped_linear_frozen


class DenseWeight(nn.Module):
    """Expert matrices in a floating dtype.

    Args:
        shape: [E, 2, F, D] for gate and up, [E, D, F] for down.
        dtype: storage dtype.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    @property
    def out_features(self) -> int:
        """Rows of one expert's matrix, gate and up together."""
        return self.weight[0].numel() // self.weight.shape[-1]

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert; a view of the weight where it has that dtype already.

        Args:
            expert: its number.
            dtype: of the result.
            out: filled and returned where the dtype has to change.
        """
        weight = self.weight[expert].flatten(0, -2)
        return weight.to(dtype) if out is None or weight.dtype is dtype else out.copy_(weight)

    def block(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """[end - begin, out, in] of a range of experts."""
        return self.weight[begin:end].flatten(1, -2).to(dtype)

    def apply_grouped(self, x: Tensor, counts: list[int]) -> Tensor:
        """Rows [R, in], sorted by expert, times their expert's matrix: [R, out]."""
        if self.weight.requires_grad:
            return grouped_linear(x, counts, self.weight.flatten(1, -2).to(x.dtype))
        return grouped_linear_frozen(x, counts, self.out_features, self.matrix)

    @torch.no_grad()
    def write_dense(self, index: tuple[int, ...], value: Tensor) -> None:
        """Fill `weight[index]`, such as (expert, 0) for a gate matrix."""
        self.weight[index].copy_(value)
