"""Expert matrices as an operator takes them: tensors, and a word that says what they mean.

Knows: dense ones, and that others are packed. Does not know: modules, files, packed forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimtab.ops.checks import check_floating, require
from trimtab.ops.packed import PackedMatrices

_DENSE = "dense"


class ExpertMatrices(Protocol):
    """The matrices of all experts of a layer, handed out one at a time."""

    @property
    def key(self) -> str:
        """How they are stored, without blanks; see `from_key`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What stores them; the first has the experts in front."""

    @property
    def out_features(self) -> int:
        """Rows of one expert's matrix, gate and up together."""

    @property
    def in_features(self) -> int:
        """Columns of one expert's matrix."""

    def check(self, argument: str) -> None:
        """Fail with TT111 unless the tensors are what the key says."""

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert, in `out` where it is given."""

    def views(self, dtype: torch.dtype) -> Sequence[Tensor] | None:
        """Every expert's [out, in] where they lie in memory in this dtype, else None."""


@dataclass(frozen=True, slots=True)
class DenseMatrices:
    """Matrices in a floating dtype.

    Args:
        weight: [E, 2, F, D] or [E, D, F]; trained where it requires a gradient.
    """

    weight: Tensor

    @property
    def key(self) -> str:
        """See `ExpertMatrices`."""
        return _DENSE

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weight."""
        return (self.weight,)

    @property
    def out_features(self) -> int:
        """Rows of one expert's matrix, gate and up together."""
        return math.prod(self.weight.shape[1:-1])

    @property
    def in_features(self) -> int:
        """Columns of one expert's matrix."""
        return self.weight.shape[-1]

    def check(self, argument: str) -> None:
        """See `ExpertMatrices`."""
        check_floating(argument, self.weight)
        shape = list(self.weight.shape)
        fits = len(shape) == 3 or (len(shape) == 4 and shape[1] == 2)
        require(fits, argument, "must have the shape [E, 2, F, D] or [E, D, F]", shape)

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert; without `out` a view of the weight if it has that dtype."""
        matrix = self.weight[expert].flatten(0, -2)
        return matrix.to(dtype) if out is None else out.copy_(matrix)

    def views(self, dtype: torch.dtype) -> Sequence[Tensor] | None:
        """Every expert's [out, in], if the weight has this dtype and its elements lie in order."""
        ready = self.weight.dtype is dtype and self.weight.is_contiguous()
        return self.weight.flatten(1, -2).unbind(0) if ready else None


def from_key(key: str, tensors: Sequence[Tensor]) -> ExpertMatrices:
    """The matrices that `key` says these tensors are."""
    if key == _DENSE:
        return DenseMatrices(tensors[0])
    return PackedMatrices.from_key(key, *tensors)
