"""What the arguments of the experts operator must be."""

from __future__ import annotations

import torch

from trimtab.ops.checks import check_floating, check_shape, require
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.lora import ExpertLoRA


def check_call(call: ExpertCall) -> None:
    """Fail unless shapes and dtypes fit together.

    Raises:
        OperatorError: TT111, naming the argument.
    """
    check_shape("experts.x", call.x, "T D")
    check_floating("experts.x", call.x)
    call.gate_up.check("experts.gate_up")
    call.down.check("experts.down")
    sizes = {"T": call.x.shape[0], "D": call.x.shape[1]}
    check_shape("experts.ids", call.ids, "T A", sizes)
    require(
        call.ids.dtype in (torch.int32, torch.int64), "experts.ids", "must be int32 or int64",
        call.ids.dtype,
    )
    sizes |= {"A": call.ids.shape[1], "E": call.num_experts, "F": call.width}
    check_shape("experts.weights", call.weights, "T A", sizes)
    check_floating("experts.weights", call.weights)
    for name, matrices, wanted in (
        ("gate_up", call.gate_up, (2 * sizes["F"], sizes["D"])),
        ("down", call.down, (sizes["D"], sizes["F"])),
    ):
        found = (matrices.out_features, matrices.in_features)
        require(found == wanted, f"experts.{name}", f"must give matrices of shape {list(wanted)}", list(found))
    experts = call.down.tensors[0].shape[0]
    require(
        experts == sizes["E"], "experts.down", f"must have as many experts as gate_up, {sizes['E']}", experts
    )
    if call.token_ids is not None:
        check_shape("experts.token_ids", call.token_ids, "T", sizes)
        require(call.token_ids.dtype is torch.int64, "experts.token_ids", "must be int64", call.token_ids.dtype)
    layouts = [pair.layout for pair in (call.lora_gate_up, call.lora_down) if pair is not None]
    require(
        len(set(layouts)) < 2, "experts.lora_down.layout", "must be that of lora_gate_up", layouts[-1:]
    )
    for name, pair in (("lora_gate_up", call.lora_gate_up), ("lora_down", call.lora_down)):
        if pair is not None:
            _check_pair(f"experts.{name}", pair, sizes, name == "lora_gate_up")
            require(
                pair.rate == 0 or call.token_ids is not None, "experts.token_ids",
                "must be given where adapters drop features", None,
            )


def _check_pair(name: str, pair: ExpertLoRA, sizes: dict[str, int], gate_up: bool) -> None:
    check_floating(f"{name}.A", pair.A)
    check_floating(f"{name}.B", pair.B)
    shared = pair.layout == "shared_outer"
    experts_a, experts_b = ("" if shared and gate_up else "E "), ("" if shared and not gate_up else "E ")
    known = sizes | {"r": pair.rank, "2": 2}
    split = gate_up and pair.A.ndim == len(f"{experts_a}r D".split()) + 1
    check_shape(f"{name}.A", pair.A, f"{experts_a}{'2 ' if split else ''}r {'D' if gate_up else 'F'}", known)
    check_shape(f"{name}.B", pair.B, f"{experts_b}{'2 F' if gate_up else 'D'} r", known)
    require(0 <= pair.rate < 1, f"{name}.rate", "must be at least 0 and below 1", pair.rate)
