"""Routed experts as they are defined: a loop over tokens and their experts.

    m_t = sum_{e in idx_t} w_te (down_e + lora) act((gate_up_e + lora) x_t)

The weight multiplies after the down projection, in at least float32, in ascending expert order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.activation import gated_activation
from trimtab.ops.dropout import expert_key, keep_mask
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.lora import ExpertLoRA
from trimtab.ops.precision import island_dtype


def experts_reference(call: ExpertCall) -> Tensor:
    """Weighted sum of the selected experts' outputs; see `experts_grouped`.

    Returns:
        [T, D] in the dtype of x.
    """
    wide = island_dtype(call.x)
    rows = []
    for t, x in enumerate(call.x):
        total = torch.zeros_like(x, dtype=wide)
        for a, expert in sorted(enumerate(call.ids[t].tolist()), key=lambda pair: pair[1]):
            if 0 <= expert < call.num_experts:
                total = total + call.weights[t, a].to(wide) * _expert(call, expert, t).to(wide)
        rows.append(total.to(x.dtype))
    return torch.stack(rows) if rows else torch.zeros_like(call.x)


def _expert(call: ExpertCall, expert: int, t: int) -> Tensor:
    """One expert on one token."""
    x = call.x[t]
    pre = call.gate_up.matrix(expert, x.dtype) @ x
    if call.lora_gate_up is not None:
        pair = call.lora_gate_up
        shared = pair.layout == "shared_outer"
        a = (pair.A if shared else pair.A[expert]).to(x.dtype)
        key = pair.key if shared else expert_key(pair.key, expert)
        inner = a @ _dropped(call, pair, x, key, t)  # [r], or [2, r] with an A for gate and for up
        b = pair.B[expert].to(x.dtype)
        pre = pre + pair.scaling * (b @ inner.unsqueeze(-1)).flatten()
    gate, up = pre.chunk(2)
    h = gated_activation(call.activation, gate, up)
    y = call.down.matrix(expert, x.dtype) @ h
    if call.lora_down is not None:
        pair = call.lora_down
        b = (pair.B if pair.layout == "shared_outer" else pair.B[expert]).to(x.dtype)
        dropped = _dropped(call, pair, h, expert_key(pair.key, expert), t)
        y = y + pair.scaling * (b @ (pair.A[expert].to(x.dtype) @ dropped))
    return y


def _dropped(call: ExpertCall, pair: ExpertLoRA, x: Tensor, key: int, t: int) -> Tensor:
    if pair.rate == 0:
        return x
    assert call.token_ids is not None, "dropout needs the global token numbers of the pack"
    kept = keep_mask(call.token_ids[t : t + 1], len(x), key, pair.rate)[0]
    return x * (kept.to(x.dtype) / (1.0 - pair.rate))
