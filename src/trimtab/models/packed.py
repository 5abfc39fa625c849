"""Matrices of routed experts kept as released: MXFP4, FP8 or INT4 values and their block scales.

Knows: where an expert's bytes lie and how to hand out one matrix at a time. Does not know: how a
form is decoded (`ops.packed`), what a model computes with it.

Letters: E experts, F FFN width, D width the experts work on.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from trimtab.arch.quantization import PackedForm
from trimtab.models.expert_lora import ExpertAdapter
from trimtab.ops.packed import DECODE, SCALE_DTYPES, DecodeOp, PackedMatrices


class PackedWeight(nn.Module):
    """Expert matrices in a packed form, never trained and never expanded together.

    Args:
        shape: logical shape, [E, 2, F, D] or [E, D, F].
        form: how they are packed.
        decode: the operator.

    Parameters: `packed` [E, out, bytes of a row] uint8, and `scale` [E, rows of scales, in / width],
    uint8 for MXFP4, float32 for FP8, bfloat16 for INT4. Where a scale stands for several rows, it
    never spans the gate and the up matrix.
    """

    lora: ExpertAdapter | None

    def __init__(
        self, shape: tuple[int, ...], form: PackedForm, decode: DecodeOp = DECODE
    ) -> None:
        super().__init__()
        self.shape, self.form = shape, form
        self._decode = decode
        self.register_module("lora", None)
        experts, *parts, rows, width = shape
        self.num_parts = prod(parts)
        height, span = form.block
        row_bytes = width // form.per_byte
        scales = self.num_parts * -(-rows // height), -(-width // span)
        self.packed = nn.Parameter(
            torch.empty(experts, self.num_parts * rows, row_bytes, dtype=torch.uint8),
            requires_grad=False,
        )
        self.scale = nn.Parameter(
            torch.empty(experts, *scales, dtype=SCALE_DTYPES[form.kind]), requires_grad=False
        )

    @property
    def matrices(self) -> PackedMatrices:
        """The tensors with what they mean, for operators."""
        return PackedMatrices(self.packed, self.scale, self.form, self.num_parts, self._decode)

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert, decoded into `out` where it is given.

        Args:
            expert: its number among those this module holds.
            dtype: of the result.
            out: [out, in] of that dtype, overwritten; what is returned then is `out`.

        Raises:
            ValueError: `out` has another shape or dtype.
        """
        return self.matrices.matrix(expert, dtype, out)

    @torch.no_grad()
    def write_packed(
        self, index: tuple[int, ...], kind: Literal["packed", "scale"], value: Tensor
    ) -> None:
        """Fill one stored tensor, such as index (expert, 1) for an up matrix, in any byte dtype."""
        target = self.stored(index, kind)
        target.copy_(value.view(target.dtype) if kind == "packed" else value)

    def stored(self, index: tuple[int, ...], kind: Literal["packed", "scale"]) -> Tensor:
        """The view of `packed` or `scale` that holds the matrix `index`, [rows, ...]."""
        whole = self.packed if kind == "packed" else self.scale
        lead = self.shape[: len(index)]
        return whole.view(*lead, -1, whole.shape[-1])[index]
