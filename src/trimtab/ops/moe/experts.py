"""Routed experts as one operator: `trimtab::experts_fwd` and `trimtab::experts_bwd`.

Knows: how a call becomes tensors and plain values and back, what it costs. The computation is
`loop.py`, its definition `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from trimtab.arch.spec import ActivationSpec
from trimtab.ops.custom import custom_op
from trimtab.ops.keep import keeps_results
from trimtab.ops.moe.check import check_call
from trimtab.ops.moe.kernels import Kernels, NativeKernels, TorchKernels
from trimtab.ops.moe.loop import ExpertCall, ExpertLoop, compute_dtype
from trimtab.ops.moe.lora import ExpertLoRA, Layout
from trimtab.ops.moe.reference import experts_reference
from trimtab.ops.moe.stored import from_key
from trimtab.ops.native.library import unavailable
from trimtab.ops.registry import Implementation, OpCase, Operator
from trimtab.ops.triton import support as triton

KEPT_BYTES = 128 * 2**20
"""Up to so many bytes a layer keeps what its activations are computed from, which saves a quarter of
the products of a training step; beyond, it is computed again."""


def experts_grouped(call: ExpertCall) -> Tensor:
    """Weighted sum over each token's experts, products of sorted rows, the rest in PyTorch.

    Args:
        call: x [T, D]; ids [T, A], of which those outside [0, E) count for nothing; weights [T, A];
            gate_up and down of E experts; adapters.

    Returns:
        [T, D] in the dtype of x, summed in at least float32 in ascending expert order.
    """
    return _run(call, native=False)


def experts_native(call: ExpertCall) -> Tensor:
    """As `experts_grouped`, with compiled kernels between the products and for few rows."""
    return _run(call, native=True)


def experts_case(call: ExpertCall) -> OpCase:
    """The sizes that the choice of an implementation depends on, after the arguments were checked.

    Raises:
        OperatorError: TT111, a shape or dtype is wrong.
    """
    check_call(call)
    t, d = call.x.shape
    rank = max((p.rank for p in (call.lora_gate_up, call.lora_down) if p is not None), default=0)
    shapes = {
        "T": t, "D": d, "E": call.num_experts, "A": call.ids.shape[1], "F": call.width,
        "r": rank,
    }
    if _plain_mxfp4(call):
        shapes["mxfp4"] = 1
    return OpCase(call.x.device.type, call.x.dtype, shapes)


def _plain_mxfp4(call: ExpertCall) -> bool:
    """MXFP4 matrices, adapters per expert with one A for gate and up, no dropout."""
    pairs = [pair for pair in (call.lora_gate_up, call.lora_down) if pair is not None]
    packed = all(m.key.startswith("mxfp4:") for m in (call.gate_up, call.down))
    plain = all(p.layout == "per_expert" and p.rate == 0 and p.A.ndim == 3 for p in pairs)
    return packed and plain


def _triton(call: ExpertCall) -> Tensor:
    from trimtab.ops.triton.experts import experts_triton

    return experts_triton(call)


def supports_triton(case: OpCase) -> str | None:
    """Why the grouped MXFP4 products cannot run a case."""
    if reason := triton.supports(case):
        return reason
    if "mxfp4" not in case.shapes:
        return "takes MXFP4 matrices, and adapters per expert without dropout"
    return None


def supports_native(case: OpCase) -> str | None:
    """Why the compiled kernels cannot run a case."""
    if case.device != "cpu":
        return "runs on the CPU only"
    if case.dtype not in (torch.float32, torch.bfloat16):
        return f"computes in float32, not for {case.dtype}"
    return unavailable("moe")


def experts_workspace_bytes(case: OpCase) -> int:
    """Peak bytes beside inputs and outputs, forward and backward: rows of one expert, sums of all."""
    s, size = case.shapes, 4 if case.device == "cpu" else case.dtype.itemsize
    rows = min(s["T"], 1024)
    per_row = 4 * s["D"] + 4 * s["F"] + 4 * s["r"]
    matrices = 3 * s["D"] * s["F"]
    routed = s["T"] * s["A"] * (8 + 8 + 4 + 4)
    return size * (rows * per_row + matrices + 3 * s["T"] * (s["D"] + s["r"])) + routed


def _run(call: ExpertCall, native: bool) -> Tensor:
    pairs = (call.lora_gate_up, call.lora_down)
    nothing = call.x.new_empty(0)
    lora = [t for p in pairs for t in ((nothing, nothing) if p is None else (p.A, p.B))]
    present = [p for p in pairs if p is not None]
    spec = call.activation
    m: Tensor = _forward_op(
        call.x, call.ids, call.weights, list(call.gate_up.tensors), list(call.down.tensors), lora,
        call.token_ids, f"{call.gate_up.key} {call.down.key} {spec.kind}",
        present[0].layout if present else "per_expert",
        [spec.beta, spec.linear_beta or 0.0, -1.0 if spec.clamp is None else spec.clamp],
        [value for p in pairs for value in ((0.0, 0.0) if p is None else (p.scaling, p.rate))],
        [0 if p is None else p.key for p in pairs], native, _has_room(call, lora),
    )[0]
    return m


def _has_room(call: ExpertCall, lora: Sequence[Tensor]) -> bool:
    """Whether a backward pass will come, and `pre` of all rows is small enough to be kept for it."""
    leaves = (call.x, call.weights, *call.gate_up.tensors, *call.down.tensors, *lora)
    if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves):
        return False
    if keeps_results():  # with the result this would be kept too, in every layer at once
        return False
    elements = call.ids.numel() * 2 * call.width
    return elements * compute_dtype(call.x).itemsize <= KEPT_BYTES


def _rebuild(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor],
    lora: Sequence[Tensor], token_ids: Tensor | None, words: str, layout: str,
    constants: Sequence[float], factors: Sequence[float], keys: Sequence[int],
) -> ExpertCall:
    """The call that `_run` took apart."""
    key_gate_up, key_down, kind = words.split(" ")
    beta, linear_beta, clamp = constants
    spec = ActivationSpec(
        "situ" if kind == "situ" else "swiglu", beta, linear_beta or None,
        None if clamp < 0 else clamp,
    )
    shared: Layout = "shared_outer" if layout == "shared_outer" else "per_expert"
    pairs = [
        ExpertLoRA(lora[2 * n], lora[2 * n + 1], shared, factors[2 * n], factors[2 * n + 1], keys[n])
        if lora[2 * n].numel() else None
        for n in range(2)
    ]
    return ExpertCall(
        x, ids, weights, from_key(key_gate_up, gate_up), from_key(key_down, down), spec, pairs[0],
        pairs[1], token_ids,
    )


def _kernels(native: bool) -> Kernels:
    return NativeKernels() if native else TorchKernels()


@custom_op("trimtab::experts_fwd")
def _forward_op(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor],
    lora: Sequence[Tensor], token_ids: Tensor | None, words: str, layout: str,
    constants: Sequence[float], factors: Sequence[float], keys: Sequence[int], native: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _rebuild(
        x, ids, weights, gate_up, down, lora, token_ids, words, layout, constants, factors, keys
    )
    return ExpertLoop(call, _kernels(native)).forward(keep)


@_forward_op.register_fake
def _forward_fake(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor],
    lora: Sequence[Tensor], token_ids: Tensor | None, words: str, layout: str,
    constants: Sequence[float], factors: Sequence[float], keys: Sequence[int], native: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    del weights, down, token_ids, words, constants, factors, keys, native
    wide = torch.promote_types(x.dtype, torch.float32)
    summed = layout == "shared_outer" and lora[2].numel() > 0
    sums = (x.shape[0], lora[2].shape[-2]) if summed else (0,)
    kept = (ids.numel(), math.prod(gate_up[0].shape[1:-1])) if keep else (0,)
    return torch.empty_like(x), x.new_empty(sums, dtype=wide), x.new_empty(kept, dtype=compute_dtype(x))


@custom_op("trimtab::experts_bwd")
def _backward_op(
    grad: Tensor, sums: Tensor, kept: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor],
    down: Sequence[Tensor], lora: Sequence[Tensor], token_ids: Tensor | None, words: str,
    layout: str, constants: Sequence[float], factors: Sequence[float], keys: Sequence[int],
    native: bool, keep: bool, trained: bool,
) -> list[Tensor]:
    call = _rebuild(
        x, ids, weights, gate_up, down, lora, token_ids, words, layout, constants, factors, keys
    )
    found = ExpertLoop(call, _kernels(native)).backward(grad, sums, kept, trained)
    every = [found.x, found.weights, *found.lora, *found.base]
    return [x.new_empty(0) if each is None else each for each in every]


@_backward_op.register_fake
def _backward_fake(
    grad: Tensor, sums: Tensor, kept: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor],
    down: Sequence[Tensor], lora: Sequence[Tensor], token_ids: Tensor | None, words: str,
    layout: str, constants: Sequence[float], factors: Sequence[float], keys: Sequence[int],
    native: bool, keep: bool, trained: bool,
) -> list[Tensor]:
    del grad, sums, kept, ids, token_ids, words, layout, constants, factors, keys, native, keep
    base = [gate_up[0], down[0]] if trained else [x.new_empty(0), x.new_empty(0)]
    return [torch.empty_like(each) for each in (x, weights, *lora, *base)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights, gate_up, down, lora, token_ids, *plain = inputs
    ctx.counts, ctx.plain = (len(gate_up), len(down)), plain
    ctx.trained = any(tensors[0].requires_grad for tensors in (gate_up, down))
    ctx.set_materialize_grads(False)  # only the first output is a result
    ctx.save_for_backward(x, ids, weights, token_ids, output[1], output[2], *gate_up, *down, *lora)


def _backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    del others
    x, ids, weights, token_ids, sums, kept, *rest = ctx.saved_tensors
    n, m = ctx.counts
    gate_up, down, lora = rest[:n], rest[n : n + m], rest[n + m :]
    found = _backward_op(
        grad, sums, kept, x, ids, weights, gate_up, down, lora, token_ids, *ctx.plain, ctx.trained
    )
    dx, dw, *dlora, d_gate_up, d_down = found
    base = [
        [gradient if ctx.trained else None, *([None] * (size - 1))]
        for gradient, size in ((d_gate_up, n), (d_down, m))
    ]
    return (dx, None, dw, base[0], base[1], dlora, None, *([None] * len(ctx.plain)))


_forward_op.register_autograd(_backward, setup_context=_setup)


def _products(
    x: Sequence[int], ids: Sequence[int], gate_up: Sequence[Sequence[int]],
    lora: Sequence[Sequence[int]], layout: str,
) -> tuple[int, int]:
    """Multiply-adds of the base and of the adapters in one forward pass, from shapes."""
    tokens, rows, d = ids[0], ids[0] * ids[1], x[1]
    out = math.prod(gate_up[0][1:-1])
    low, shared = 0, layout == "shared_outer"
    outer = tokens if shared else rows
    if math.prod(lora[0]):
        experts = 1 if shared else gate_up[0][0]
        low += outer * math.prod(lora[0]) // experts + rows * lora[0][-2] * out
    if math.prod(lora[2]):
        low += rows * lora[2][-2] * out // 2 + outer * lora[2][-2] * d
    return rows * d * out * 3 // 2, low


@register_flop_formula(torch.ops.trimtab.experts_fwd)
def _forward_flops(
    x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, lora: Any, token_ids: Any,
    words: str, layout: str, *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:
    del weights, down, token_ids, words, args, out_shape, kwargs
    base, low = _products(x, ids, gate_up, lora, layout)
    return 2 * (base + low)


@register_flop_formula(torch.ops.trimtab.experts_bwd)
def _backward_flops(
    grad: Any, sums: Any, kept: Any, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, lora: Any,
    token_ids: Any, words: str, layout: str, *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:
    # Gradient of the input as much as the forward pass, gate_up again where it was not kept; an
    # adapter is computed again and has two gradients.
    del grad, sums, weights, down, token_ids, words, out_shape, kwargs
    base, low = _products(x, ids, gate_up, lora, layout)
    again = 0 if math.prod(kept) else base * 2 // 3
    return 2 * (base + again + 3 * low + (base if args[-1] else 0))


EXPERTS: Operator[[ExpertCall], Tensor] = Operator(
    "experts", experts_case,
    (
        Implementation("triton", _triton, supports_triton),
        Implementation("native", experts_native, supports_native, experts_workspace_bytes),
        Implementation("grouped", experts_grouped, workspace_bytes=experts_workspace_bytes),
        Implementation("reference", experts_reference),
    ),
    {"T": 4096, "D": 512, "E": 64, "A": 8, "F": 256, "r": 0},
)
