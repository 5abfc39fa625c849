"""The native forms of what surrounds the scan: convolution with SiLU and L2 norm, gated norm."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.ops.custom import custom_op
from trimtab.ops.native.call import address
from trimtab.ops.native.library import library, unavailable
from trimtab.ops.registry import OpCase

_L2_EPS = 1e-6
_MOST_TAPS, _LARGEST_HEAD = 8, 512


def supports(case: OpCase) -> str | None:
    """Why the kernels cannot run a case, or None; heads are "V" or, before the scan, "K"."""
    head, taps = case.shapes.get("K") or case.shapes["V"], case.shapes.get("taps", 1)
    if case.device != "cpu":
        return f"runs on cpu, not on {case.device}"
    if case.dtype is not torch.float32:
        return f"computes in float32, not {str(case.dtype).removeprefix('torch.')}"
    if head % 8 or head > _LARGEST_HEAD:
        return f"needs heads of a multiple of 8 channels up to {_LARGEST_HEAD}, not {head}"
    if taps > _MOST_TAPS:
        return f"has at most {_MOST_TAPS} taps, not {taps}"
    return unavailable("mixer")


def conv_silu_native(
    x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool
) -> Tensor:
    """Arguments and result as `conv_silu_reference`; one pass, and backward keeps only its inputs."""
    taps = weight.to(x.dtype).flatten(1).contiguous()
    out: Tensor = _conv_fwd(x.contiguous(), taps, positions.long().contiguous(), head, normed)
    return out


def gated_norm_native(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Arguments and result as `gated_rms_norm`; one pass, and backward keeps only its inputs."""
    inputs = (each.to(gate.dtype).contiguous() for each in (x, gate, weight))
    out: Tensor = _norm_fwd(*inputs, eps)
    return out


@custom_op("trimtab::conv_silu_fwd")
def _conv_fwd(x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool) -> Tensor:
    out = torch.empty_like(x)
    library("mixer").conv_forward(
        address(x), *_conv_sizes(x, weight, positions, head, normed), address(out),
        torch.get_num_threads(),
    )
    return out


def _conv_sizes(
    x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool
) -> tuple[object, ...]:
    tokens, width = x.shape
    return (
        address(weight), address(positions), ctypes.c_int64(tokens), width, weight.shape[1], head,
        int(normed), ctypes.c_float(_L2_EPS),
    )


@_conv_fwd.register_fake
def _(x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool) -> Tensor:
    return torch.empty_like(x)


@custom_op("trimtab::conv_silu_bwd")
def _conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    library("mixer").conv_backward(
        address(dy), address(x), *_conv_sizes(x, weight, positions, head, normed), address(dx),
        address(dweight), torch.get_num_threads(),
    )
    return dx, dweight


@_conv_bwd.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _conv_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.form = inputs[3:]


def _conv_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight = _conv_bwd(dy.contiguous(), *ctx.saved_tensors, *ctx.form)
    return dx, dweight, None, None, None


_conv_fwd.register_autograd(_conv_gradients, setup_context=_conv_keep)


@custom_op("trimtab::gated_norm_fwd")
def _norm_fwd(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    library("mixer").gated_norm_forward(
        address(x), address(gate), address(weight), *_norm_sizes(x, eps), address(out),
        torch.get_num_threads(),
    )
    return out


def _norm_sizes(x: Tensor, eps: float) -> tuple[object, ...]:
    tokens, heads, value = x.shape
    return ctypes.c_int64(tokens), heads, value, ctypes.c_float(eps)


@_norm_fwd.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@custom_op("trimtab::gated_norm_bwd")
def _norm_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    by_head = torch.empty_like(x[0]) if len(x) else torch.zeros_like(weight).unsqueeze(0)
    library("mixer").gated_norm_backward(
        address(dy), address(x), address(gate), address(weight), *_norm_sizes(x, eps), address(dx),
        address(dgate), address(by_head), torch.get_num_threads(),
    )
    return dx, dgate, by_head.sum(0)


@_norm_bwd.register_fake
def _(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(weight)


def _norm_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.eps = inputs[3]


def _norm_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_norm_bwd(dy.contiguous(), *ctx.saved_tensors, ctx.eps), None


_norm_fwd.register_autograd(_norm_gradients, setup_context=_norm_keep)


@register_flop_formula(_conv_fwd.packet)
def _conv_flops(
    x: tuple[int, int], weight: tuple[int, int], *_: object, **__: object
) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(_conv_bwd.packet)
def _conv_backward_flops(
    dy: tuple[int, int], x: tuple[int, int], weight: tuple[int, int], *_: object, **__: object
) -> int:
    return 6 * x[0] * weight[0] * weight[1]
