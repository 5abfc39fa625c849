"""The one Linear of the model, with an optional LoRA child, and weight-only norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.ops.norm import rms_norm
from trimtab.ops.precision import linear

if TYPE_CHECKING:
    from trimtab.models.context import ForwardContext
    from trimtab.models.lora import LoRA


class Linear(nn.Module):
    """y = W x, plus a bias where there is one and the LoRA delta where a child `lora` is set.

    Args:
        in_features: width of x.
        out_features: width of y.
        dtype: storage dtype of weight and bias.
        bias: whether there is one.
    """

    lora: LoRA | None
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
        self.register_module("lora", None)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[..., in] -> [..., out] in the dtype of x."""
        y = linear(x, self.weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y if self.lora is None else y + self.lora(x, ctx)

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """[out, in] with the LoRA delta added, for paths that absorb the matrix."""
        weight = self.weight.to(dtype)
        return weight if self.lora is None else weight + self.lora.delta(dtype)


class RMSNorm(nn.Module):
    """RMS norm with a plain gain."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


class LayerNormWeights(nn.Module):
    """Gain and bias of a layer norm."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)


class Weight(nn.Module):
    """A module that only holds a tensor `weight`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
