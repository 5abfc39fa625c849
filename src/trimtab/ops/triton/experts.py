"""Routed experts whose matrices are MXFP4, on CUDA devices: rows sorted by expert, two grouped products."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.activation import gated_activation
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.lora import ExpertLoRA
from trimtab.ops.moe.stored import ExpertMatrices
from trimtab.ops.precision import island_dtype
from trimtab.ops.triton.activation import situ_triton
from trimtab.ops.triton.mxfp4 import mxfp4_grouped_fwd


def experts_triton(call: ExpertCall) -> Tensor:
    """Weighted sum over each token's experts; arguments and result as `experts_grouped`."""
    tokens, top_k = call.ids.shape
    flat, experts = call.ids.flatten(), call.num_experts
    real = (flat >= 0) & (flat < experts)
    keys = torch.where(real, flat, experts)
    order = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys, minlength=experts + 1)[:experts].tolist()
    order = order[: sum(counts)]
    pre = _grouped(call.x[order // top_k], call.gate_up, call.lora_gate_up, counts)
    gate, up = pre.chunk(2, -1)
    act = situ_triton if call.activation.kind == "situ" else gated_activation
    y = _grouped(act(call.activation, gate, up), call.down, call.lora_down, counts)
    place = torch.zeros_like(flat).scatter_(0, order, torch.arange(len(order), device=flat.device))
    wide = island_dtype(call.x)
    if not len(order):
        return call.x * 0
    weights = call.weights.to(wide) * real.view(tokens, top_k)
    rows = y[place].view(tokens, top_k, -1).to(wide)
    return (rows * weights.unsqueeze(-1)).sum(1).to(call.x.dtype)


def _grouped(
    x: Tensor, matrices: ExpertMatrices, lora: ExpertLoRA | None, counts: list[int]
) -> Tensor:
    packed, scale = matrices.tensors
    empty = x.new_empty(0)
    a = empty if lora is None else lora.A
    b = empty if lora is None else lora.B.flatten(1, -2)
    scaling = 0.0 if lora is None else lora.scaling
    y: Tensor = mxfp4_grouped_fwd(x, packed, scale, a, b, counts, scaling)
    return y
