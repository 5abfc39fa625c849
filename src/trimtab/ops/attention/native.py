"""The compiled passes over scores of `native/attention.cpp`, on contiguous float32 CPU tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.ops.attention.packs import row_bytes
from trimtab.ops.native.library import library, unavailable
from trimtab.ops.registry import OpCase

_NAME = "attention"


def supports(case: OpCase) -> str | None:
    """Why the compiled passes cannot run a case, or None."""
    if case.device != "cpu":
        return f"compiled for the CPU, the call is on {case.device}"
    if case.dtype is torch.float64:
        return f"computes in float32, the call is in {case.dtype}"
    return unavailable(_NAME)


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which columns each row of a block may use.

    Args:
        bits: [q, bytes] uint8, packed as in a selection; None where ranges say it.
        first: [q] int32, first column.
        last: [q] int32, one after the last column.
    """

    bits: Tensor | None
    first: Tensor | None = None
    last: Tensor | None = None

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """See `TileMask`."""
        heads, rows, width = scores.shape
        lse, weight = scores.new_empty(heads, rows), scores.new_empty(heads, rows)
        library(_NAME).attention_softmax(
            _at(scores), _n(heads), _n(rows), _n(width), *self._pointers(), _at(lse), _at(weight),
            torch.get_num_threads(),
        )
        return lse, weight

    def probabilities(self, scores: Tensor, lse: Tensor) -> None:
        """See `TileMask`."""
        heads, rows, width = scores.shape
        lse = lse.contiguous()
        library(_NAME).attention_probabilities(
            _at(scores), _n(heads), _n(rows), _n(width), *self._pointers(), _at(lse),
            torch.get_num_threads(),
        )

    def score_gradient(self, gradient: Tensor, p: Tensor, delta: Tensor) -> None:
        """See `TileMask`."""
        delta = delta.contiguous()
        library(_NAME).attention_score_gradient(
            _at(gradient), _at(p), _at(delta), _n(delta.numel()), _n(p.shape[-1]),
            torch.get_num_threads(),
        )

    def _pointers(self) -> tuple[object, ...]:
        if self.bits is not None:
            return _at(self.bits), _n(self.bits.shape[1]), None, None
        assert self.first is not None and self.last is not None, "ranges where there are no bits"
        return None, _n(0), _at(self.first), _at(self.last)


def add_relu(scores: Tensor, products: Tensor, weights: Tensor) -> None:
    """scores += weights * relu(products), for [q, s], [q, s] and [q]."""
    library(_NAME).attention_add_relu(
        _at(scores), _at(products), ctypes.c_void_p(weights.data_ptr()), _n(weights.stride(0)),
        _n(scores.shape[0]), _n(scores.shape[1]), torch.get_num_threads(),
    )


def select_rows(scores: Tensor, first: Tensor, last: Tensor, top_k: int) -> Tensor:
    """The top_k of columns first .. last - 1 of each row, of equal scores the lowest.

    Args:
        scores: [q, s].
        first: [q] int32.
        last: [q] int32.
        top_k: columns kept.

    Returns:
        [q, bytes] uint8, as `pack_bits` packs.
    """
    rows, width = scores.shape
    bits = torch.empty(rows, row_bytes(width), dtype=torch.uint8)
    library(_NAME).attention_select(
        _at(scores), _at(first), _at(last), _n(rows), _n(width), _n(top_k), _at(bits),
        _n(bits.shape[1]), torch.get_num_threads(),
    )
    return bits


def _at(x: Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous(), "kernels index rows by their width"
    return ctypes.c_void_p(x.data_ptr())


_n = ctypes.c_int64
