"""The steps between the matrix products of routed experts, in PyTorch and in C++.

Both have the same methods; the C++ ones want contiguous float32 on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from typing import Protocol

import torch
from torch import Tensor

from trimtab.arch.spec import ActivationSpec
from trimtab.ops.dropout import keep_mask, least_kept
from trimtab.ops.moe.gating import gate_rows, gate_rows_backward
from trimtab.ops.native.library import library

# Below so many rows a BLAS spends more on packing the weights than on multiplying.
_FEW_ROWS = 56


class Kernels(Protocol):
    """What an expert loop needs beside matrices. m rows of one expert, T tokens."""

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:
        """Flat positions [R] by expert, earlier ones first, and rows per expert.

        Ids outside [0, experts) are left out.
        """

    def gather(self, x: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        """out = x[tokens]."""

    def scatter(self, y: Tensor, tokens: Tensor, weight: Tensor | None, out: Tensor) -> None:
        """out[tokens] += weight * y, in the dtype of `out`; tokens are distinct."""

    def gate(self, spec: ActivationSpec, pre: Tensor, out: Tensor) -> Tensor:
        """Activations [m, F] of pre [m, 2F]."""

    def gate_backward(
        self, spec: ActivationSpec, pre: Tensor, dh: Tensor, weight: Tensor, d_pre: Tensor,
        h: Tensor, dw: Tensor,
    ) -> None:
        """`d_pre` becomes the gradient of `pre`, `h` the activations, `dw` [m] that of the weights."""

    def drop(self, x: Tensor, token_ids: Tensor, key: int, rate: float) -> Tensor:
        """x with dropped elements 0 and the others over 1 - rate."""

    def times_transposed(self, x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """out [m, n] = x [m, k] matrix^T, matrix [n, k]."""

    def times(self, x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """out [m, n] = x [m, k] matrix, matrix [k, n]."""


class TorchKernels:
    """See `Kernels`; any device and dtype."""

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:  # noqa: D102
        flat = ids.flatten()
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
        counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
        return torch.argsort(flat, stable=True)[: sum(counts)], counts

    def gather(self, x: Tensor, tokens: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        return torch.index_select(x, 0, tokens, out=out)

    def scatter(self, y: Tensor, tokens: Tensor, weight: Tensor | None, out: Tensor) -> None:  # noqa: D102
        wide = y.to(out.dtype)
        out.index_add_(0, tokens, wide if weight is None else wide * weight.unsqueeze(-1))

    def gate(self, spec: ActivationSpec, pre: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        return out.copy_(gate_rows(spec, pre))

    def gate_backward(  # noqa: D102
        self, spec: ActivationSpec, pre: Tensor, dh: Tensor, weight: Tensor, d_pre: Tensor,
        h: Tensor, dw: Tensor,
    ) -> None:
        found, value, d_weight = gate_rows_backward(spec, pre, dh, weight)
        d_pre.copy_(found)
        h.copy_(value)
        dw.copy_(d_weight)

    def drop(self, x: Tensor, token_ids: Tensor, key: int, rate: float) -> Tensor:  # noqa: D102
        return x * (keep_mask(token_ids, x.shape[-1], key, rate).to(x.dtype) / (1.0 - rate))

    def times_transposed(self, x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        return torch.mm(x, matrix.mT, out=out)

    def times(self, x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        return torch.mm(x, matrix, out=out)


class NativeKernels:
    """See `Kernels`; contiguous float32 on the CPU."""

    def __init__(self) -> None:
        self._lib = _typed(library("moe"))
        self._threads = torch.get_num_threads()

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:  # noqa: D102
        flat = ids.to(torch.int64).contiguous()
        order, counts = torch.empty(flat.numel(), dtype=torch.int64), torch.empty(experts, dtype=torch.int64)
        self._lib.moe_sort(
            flat.data_ptr(), flat.numel(), experts, order.data_ptr(), counts.data_ptr()
        )
        listed: list[int] = counts.tolist()
        return order[: sum(listed)], listed

    def gather(self, x: Tensor, tokens: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        self._lib.moe_gather(
            x.data_ptr(), tokens.data_ptr(), out.data_ptr(), *out.shape, self._threads
        )
        return out

    def scatter(self, y: Tensor, tokens: Tensor, weight: Tensor | None, out: Tensor) -> None:  # noqa: D102
        self._lib.moe_scatter(
            y.data_ptr(), tokens.data_ptr(), None if weight is None else weight.data_ptr(),
            out.data_ptr(), *y.shape, self._threads,
        )

    def gate(self, spec: ActivationSpec, pre: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        self._lib.moe_gate(
            pre.data_ptr(), out.data_ptr(), *out.shape, *_constants(spec), self._threads
        )
        return out

    def gate_backward(  # noqa: D102
        self, spec: ActivationSpec, pre: Tensor, dh: Tensor, weight: Tensor, d_pre: Tensor,
        h: Tensor, dw: Tensor,
    ) -> None:
        self._lib.moe_gate_backward(
            pre.data_ptr(), dh.data_ptr(), weight.data_ptr(), d_pre.data_ptr(), h.data_ptr(),
            dw.data_ptr(), *dh.shape, *_constants(spec), self._threads,
        )

    def drop(self, x: Tensor, token_ids: Tensor, key: int, rate: float) -> Tensor:  # noqa: D102
        out, token_ids = torch.empty_like(x), token_ids.contiguous()
        self._lib.moe_dropout(
            x.data_ptr(), token_ids.data_ptr(), out.data_ptr(), *x.shape, key % (1 << 64),
            least_kept(rate), 1.0 / (1.0 - rate), self._threads,
        )
        return out

    def times_transposed(self, x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        if x.shape[0] > _FEW_ROWS or not matrix.is_contiguous():
            return torch.mm(x, matrix.mT, out=out)
        rows, inner = x.shape
        self._lib.moe_dots(
            x.data_ptr(), matrix.data_ptr(), out.data_ptr(), rows, inner, out.shape[1], self._threads
        )
        return out

    def times(self, x: Tensor, matrix: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        if x.shape[0] > _FEW_ROWS or not matrix.is_contiguous():
            return torch.mm(x, matrix, out=out)
        rows, inner = x.shape
        self._lib.moe_product(
            x.data_ptr(), matrix.data_ptr(), out.data_ptr(), rows, inner, out.shape[1], self._threads
        )
        return out


def _constants(spec: ActivationSpec) -> tuple[float, float, float]:
    """beta, linear_beta and clamp as the C++ functions read them."""
    clamp = math.inf if spec.clamp is None else spec.clamp
    if spec.kind == "situ":
        return spec.beta, spec.linear_beta or 0.0, clamp
    return 0.0, 0.0, clamp


def _typed(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, real, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    constants = (real, real, real)
    arguments = {
        "moe_sort": (pointer, size, size, pointer, pointer),
        "moe_gather": (pointer, pointer, pointer, size, size, count),
        "moe_scatter": (pointer, pointer, pointer, pointer, size, size, count),
        "moe_gate": (pointer, pointer, size, size, *constants, count),
        "moe_gate_backward": (*[pointer] * 6, size, size, *constants, count),
        "moe_dropout": (*[pointer] * 3, size, size, ctypes.c_uint64, size, real, count),
        "moe_dots": (*[pointer] * 3, size, size, size, count),
        "moe_product": (*[pointer] * 3, size, size, size, count),
    }
    for name, types in arguments.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = types, None
    return lib
