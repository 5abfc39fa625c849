"""Weights of routed experts: dense, or packed in 4 bits as released.

Both give one expert's matrix at a time, so that the packed form is never expanded as a whole.
Letters: E experts, F FFN width, D width the experts work on.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from trimtab.ops import mxfp4
from trimtab.ops.moe.stored import DenseMatrices, Mxfp4Matrices


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
    def matrices(self) -> DenseMatrices:
        """The tensors with what they mean, for operators."""
        return DenseMatrices(self.weight)

    @torch.no_grad()
    def write_dense(self, index: tuple[int, ...], value: Tensor) -> None:
        """Fill `weight[index]`, such as (expert, 0) for a gate matrix."""
        self.weight[index].copy_(value)


class PackedWeight(nn.Module):
    """Expert matrices in MXFP4.

    Args:
        shape: logical shape, [E, 2, F, D] or [E, D, F].

    Parameters: `packed` [E, out, in/2] and `scale` [E, out, in/32], uint8, never trained.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        experts, width = shape[0], shape[-1]
        rows = 1
        for size in shape[1:-1]:
            rows *= size
        self.packed = nn.Parameter(
            torch.empty(experts, rows, width // 2, dtype=torch.uint8), requires_grad=False
        )
        self.scale = nn.Parameter(
            torch.empty(experts, rows, width // mxfp4.BLOCK, dtype=torch.uint8),
            requires_grad=False,
        )

    @property
    def matrices(self) -> Mxfp4Matrices:
        """The tensors with what they mean, for operators."""
        return Mxfp4Matrices(self.packed, self.scale)

    @torch.no_grad()
    def write_packed(
        self, index: tuple[int, ...], kind: Literal["packed", "scale"], value: Tensor
    ) -> None:
        """Fill one stored tensor, such as index (expert, 1) for an up matrix, [F, in/2] uint8."""
        target = self.packed if kind == "packed" else self.scale
        target.view(*self.shape[:-1], -1)[index].copy_(value)
