"""SiTU as one elementwise kernel each way; gate and up are all that is saved."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.arch.spec import ActivationSpec
from trimtab.ops.custom import custom_op

_BLOCK = 1024


@triton.jit
def _tanh(x):
    # tanh from the exponential of a negative number, which cannot overflow.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _forward_kernel(gate, up, out, n, beta, bound, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    if BOUNDED:
        u = bound * _tanh(u / bound)
    y = beta * _tanh(g / beta) * tl.sigmoid(g) * u
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, gate, up, d_gate, d_up, n, beta, bound, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    dy = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    t, s = _tanh(g / beta), tl.sigmoid(g)
    left = beta * t * s
    d_left = s * (1.0 - t * t) + left * (1.0 - s)
    right, d_right = u, 1.0 + 0.0 * u
    if BOUNDED:
        v = _tanh(u / bound)
        right, d_right = bound * v, 1.0 - v * v
    tl.store(d_gate + at, (dy * d_left * right).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (dy * left * d_right).to(d_up.dtype.element_ty), mask=inside)


def situ_triton(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
    """SiTU; arguments and result as `gated_activation`."""
    out: Tensor = situ_triton_fwd(gate, up, spec.beta, spec.linear_beta)
    return out


@custom_op("trimtab::situ_triton_fwd")
def situ_triton_fwd(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU in the dtype of gate."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n = gate.numel()
    if n:
        _forward_kernel[(triton.cdiv(n, _BLOCK),)](
            gate, up, out, n, beta, linear_beta or 1.0, linear_beta is not None, _BLOCK
        )
    return out


@custom_op("trimtab::situ_triton_bwd")
def situ_triton_bwd(
    grad: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    if n:
        _backward_kernel[(triton.cdiv(n, _BLOCK),)](
            grad, gate, up, d_gate, d_up, n, beta, linear_beta or 1.0, linear_beta is not None,
            _BLOCK,
        )
    return d_gate, d_up


@situ_triton_fwd.register_fake
def _(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    return gate.new_empty(gate.shape)


@situ_triton_bwd.register_fake
def _(
    grad: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.constants = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*situ_triton_bwd(grad, *ctx.saved_tensors, *ctx.constants), None, None)


situ_triton_fwd.register_autograd(_backward, setup_context=_setup)
