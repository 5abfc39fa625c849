"""Gated activations of feed-forward networks."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.precision import island_dtype


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(g/beta) sigmoid(g) * lb tanh(u/lb), in at least float32, cast at the end.

    The up branch stays linear where `linear_beta` is None.
    """
    dtype = island_dtype(gate)
    g, u = gate.to(dtype), up.to(dtype)
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor, clamp: float | None) -> Tensor:
    """silu(g) * u; with a clamp L, g <- min(g, L) and u <- clamp(u, -L, L) first."""
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return torch.nn.functional.silu(gate) * up
