"""The gated activation of experts on fused rows [gate, up], and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.arch.spec import ActivationSpec
from trimtab.ops.activation import gated_activation


def gate_rows(spec: ActivationSpec, pre: Tensor) -> Tensor:
    """[m, 2F] -> [m, F], in the dtype of `pre`."""
    gate, up = pre.chunk(2, -1)
    return gated_activation(spec, gate, up)


def gate_rows_backward(
    spec: ActivationSpec, pre: Tensor, dh: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of weighted activations, which are computed again.

    Args:
        spec: the activation.
        pre: [m, 2F].
        dh: [m, F], gradient of the activations before the weight.
        weight: [m] in at least float32.

    Returns:
        Gradient of `pre` [m, 2F], activations [m, F], gradient of the weights [m].
    """
    wide = weight.dtype
    gate, up = (part.to(wide) for part in pre.chunk(2, -1))
    left, d_left, right, d_right = _factors(spec, gate, up)
    value, grad = left * right, dh.to(wide)
    dw = (grad * value).sum(-1)
    scaled = grad * weight.unsqueeze(-1)
    d_pre = torch.cat((scaled * d_left * right, scaled * left * d_right), -1)
    return d_pre.to(pre.dtype), value.to(pre.dtype), dw


def _factors(
    spec: ActivationSpec, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """act = left(gate) right(up): left, its derivative, right, its derivative."""
    if spec.kind == "situ":
        t, s = torch.tanh(gate / spec.beta), torch.sigmoid(gate)
        d_left = s * ((1 - t * t) + spec.beta * t * (1 - s))
        if spec.linear_beta is None:
            return spec.beta * t * s, d_left, up, torch.ones_like(up)
        v = torch.tanh(up / spec.linear_beta)
        return spec.beta * t * s, d_left, spec.linear_beta * v, 1 - v * v
    g, u = gate, up
    if spec.clamp is not None:
        g, u = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
    s = torch.sigmoid(g)
    d_left = s * (1 + g * (1 - s)) * (g == gate)
    return g * s, d_left, u, (u == up).to(up.dtype)
