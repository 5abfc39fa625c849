"""Gated activations of feed-forward networks."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.arch.spec import ActivationSpec
from trimtab.ops.checks import check_floating, require
from trimtab.ops.fused.activation import gated_activation_fwd, workspace_bytes
from trimtab.ops.precision import island_dtype
from trimtab.ops.registry import Implementation, OpCase, Operator
from trimtab.ops.triton import support as triton


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


def gated_activation(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
    """Reference: act(gate, up) as the spec says.

    Args:
        spec: kind and constants.
        gate: [..., F].
        up: as gate.

    Returns:
        As gate.
    """
    if spec.kind == "situ":
        return situ(gate, up, spec.beta, spec.linear_beta)
    return swiglu(gate, up, spec.clamp)


def _in_blocks(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
    constants = (spec.kind, spec.beta, spec.linear_beta, spec.clamp)
    out: Tensor = gated_activation_fwd(gate, up, *constants)
    return out


def _triton(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
    from trimtab.ops.triton.activation import situ_triton

    return situ_triton(spec, gate, up)


def _triton_supports(case: OpCase) -> str | None:
    return triton.supports(case) or (None if "situ" in case.shapes else "has a kernel for SiTU only")


def activation_case(spec: ActivationSpec, gate: Tensor, up: Tensor) -> OpCase:
    """The case of a call, after its arguments were checked.

    Raises:
        OperatorError: TT111, a shape or dtype is wrong.
    """
    check_floating("activation.gate", gate)
    require(gate.ndim > 0, "activation.gate", "must have a dimension F", gate.ndim)
    require(up.shape == gate.shape, "activation.up", f"must be {list(gate.shape)} as gate is", list(up.shape))
    require(up.dtype is gate.dtype, "activation.up", f"must be {gate.dtype} as gate is", up.dtype)
    width = gate.shape[-1]
    rows = gate.numel() // width if width else 0
    kind = {"situ": 1} if spec.kind == "situ" else {}
    return OpCase(gate.device.type, gate.dtype, {"T": rows, "F": width, **kind})


ACTIVATION: Operator[[ActivationSpec, Tensor, Tensor], Tensor] = Operator(
    "activation", activation_case,
    (
        Implementation("triton", _triton, _triton_supports),
        Implementation(
            "blocks", _in_blocks, workspace_bytes=lambda case: workspace_bytes(case.shapes)
        ),
        Implementation("reference", gated_activation),
    ),
    {"T": 4096, "F": 6144, "situ": 1},
)
