"""Weights of routed experts in a floating dtype; packed ones are `packed.PackedWeight`.

The operator reads both one expert at a time, so that the packed form is never expanded as a whole.
Letters: E experts, F FFN width, D width the experts work on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.models.expert_lora import ExpertAdapter
from trimtab.ops.moe.stored import DenseMatrices


class DenseWeight(nn.Module):
    """Expert matrices in a floating dtype, with an optional LoRA child.

    Args:
        shape: [E, 2, F, D] for gate and up, [E, D, F] for down.
        dtype: storage dtype.
    """

    lora: ExpertAdapter | None

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.register_module("lora", None)

    @property
    def matrices(self) -> DenseMatrices:
        """The tensors with what they mean, for operators."""
        return DenseMatrices(self.weight)

    @torch.no_grad()
    def write_dense(self, index: tuple[int, ...], value: Tensor) -> None:
        """Fill `weight[index]`, such as (expert, 0) for a gate matrix."""
        self.weight[index].copy_(value)
