"""Expert matrices as an operator takes them: tensors, and a word that says what they mean.

Knows: how one expert's matrix comes out of the tensors that store all of them. Does not know:
modules, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimtab.ops import mxfp4

_DENSE, _MXFP4 = "dense", "mxfp4"


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

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert, in `out` where it is given and has to be computed."""


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
        return self.weight[0].numel() // self.weight.shape[-1]

    @property
    def in_features(self) -> int:
        """Columns of one expert's matrix."""
        return self.weight.shape[-1]

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert; a view of the weight where it has that dtype already."""
        matrix = self.weight[expert].flatten(0, -2)
        return matrix.to(dtype) if out is None or matrix.dtype is dtype else out.copy_(matrix)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrices:
    """Matrices in MXFP4, decoded one at a time.

    Args:
        packed: [E, out, in/2] uint8.
        scale: [E, out, in/32] uint8.
    """

    packed: Tensor
    scale: Tensor

    @property
    def key(self) -> str:
        """See `ExpertMatrices`."""
        return _MXFP4

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Values and scales."""
        return (self.packed, self.scale)

    @property
    def out_features(self) -> int:
        """Rows of one expert's matrix, gate and up together."""
        return self.packed.shape[1]

    @property
    def in_features(self) -> int:
        """Columns of one expert's matrix."""
        return self.packed.shape[2] * 2

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert."""
        decoded = mxfp4.decode(self.packed[expert], self.scale[expert], dtype)
        return decoded if out is None else out.copy_(decoded)


def from_key(key: str, tensors: Sequence[Tensor]) -> ExpertMatrices:
    """The matrices that `key` says these tensors are."""
    if key == _DENSE:
        return DenseMatrices(tensors[0])
    if key == _MXFP4:
        return Mxfp4Matrices(tensors[0], tensors[1])
    raise ValueError(f"no expert matrices of the form {key}")
