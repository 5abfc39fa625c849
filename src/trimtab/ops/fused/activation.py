"""Gated activations in one pass, forward and backward, in blocks that stay in the cache.

Saved are gate and up alone; the backward pass computes what it needs again. Everything between
reading and writing is in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.custom import custom_op
from trimtab.ops.precision import island_dtype

_BLOCK_ELEMENTS = 1 << 15  # 128 KiB of float32 per temporary


def workspace_bytes(shapes: Mapping[str, int]) -> int:
    """Bytes beside inputs and output, either pass.

    Args:
        shapes: F, the width of a row.
    """
    return 8 * 4 * max(_BLOCK_ELEMENTS, shapes["F"])


@custom_op("trimtab::gated_activation_fwd")
def gated_activation_fwd(
    gate: Tensor, up: Tensor, kind: str, beta: float, linear_beta: float | None,
    clamp: float | None,
) -> Tensor:
    """act(gate, up) in the dtype and shape of gate; `kind` is situ or swiglu."""
    left, right = _branches(kind, beta, linear_beta, clamp)
    dtype = island_dtype(gate)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for g, u, y in _blocks(gate, up, out):
        y.copy_(left(g.to(dtype), False)[0].mul_(right(u.to(dtype), False)[0]))
    return out


@custom_op("trimtab::gated_activation_bwd")
def gated_activation_bwd(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str, beta: float, linear_beta: float | None,
    clamp: float | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    left, right = _branches(kind, beta, linear_beta, clamp)
    dtype = island_dtype(gate)
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_up = torch.empty_like(d_gate)
    for dy, g, u, dg, du in _blocks(grad, gate, up, d_gate, d_up):
        wide = dy.to(dtype)
        a, a_slope = left(g.to(dtype), True)
        b, b_slope = right(u.to(dtype), True)
        du.copy_(b_slope.mul_(a).mul_(wide))
        dg.copy_(a_slope.mul_(b).mul_(wide))
    return d_gate, d_up


# A branch maps x to its value and, if asked, its derivative; both are fresh tensors.
_Branch = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


def _branches(
    kind: str, beta: float, linear_beta: float | None, clamp: float | None
) -> tuple[_Branch, _Branch]:
    if kind == "situ":
        return partial(_situ_gate, beta), partial(_bounded, linear_beta)
    return partial(_silu, clamp), partial(_clamped, clamp)


def _situ_gate(beta: float, x: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
    """beta tanh(x/beta) sigmoid(x), and s (1 - t^2) + value (1 - s)."""
    t, s = torch.tanh(x / beta), torch.sigmoid(x)
    value = (t * s).mul_(beta)
    if not slope:
        return value, value
    flat = t.square_().neg_().add_(1).mul_(s)
    return value, flat.add_(s.neg_().add_(1).mul_(value))


def _bounded(bound: float | None, x: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
    """lb tanh(x/lb), and 1 - tanh^2; the line itself without a bound."""
    if bound is None:
        return x.clone(), torch.ones_like(x) if slope else x
    t = torch.tanh(x / bound)
    value = t * bound
    return value, t.square_().neg_().add_(1) if slope else t


def _silu(clamp: float | None, x: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
    """silu(min(x, L)), and s (1 + x (1 - s)) below L."""
    low = x if clamp is None else x.clamp(max=clamp)
    s = torch.sigmoid(low)
    value = low * s
    if not slope:
        return value, s
    steep = (1 - s).mul_(value).add_(s)
    return value, steep if clamp is None else steep.mul_(x <= clamp)


def _clamped(clamp: float | None, x: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
    """x held within +-L, and 1 inside."""
    if clamp is None:
        return x.clone(), torch.ones_like(x) if slope else x
    value = x.clamp(-clamp, clamp)
    return value, (x.abs() <= clamp).to(x.dtype) if slope else value


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor, few enough to stay in the cache."""
    rows = [x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x for x in tensors]
    step = max(1, _BLOCK_ELEMENTS // max(1, rows[0].shape[1]))
    for start in range(0, len(rows[0]), step):
        yield tuple(x[start : start + step] for x in rows)


@gated_activation_fwd.register_fake
def _fake_fwd(
    gate: Tensor, up: Tensor, kind: str, beta: float, linear_beta: float | None,
    clamp: float | None,
) -> Tensor:
    del up, kind, beta, linear_beta, clamp
    return gate.new_empty(gate.shape)


@gated_activation_bwd.register_fake
def _fake_bwd(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str, beta: float, linear_beta: float | None,
    clamp: float | None,
) -> tuple[Tensor, Tensor]:
    del grad, kind, beta, linear_beta, clamp
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:2])
    ctx.constants = inputs[2:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    return (*gated_activation_bwd(grad, gate, up, *ctx.constants), None, None, None, None)


gated_activation_fwd.register_autograd(_backward, setup_context=_setup)
