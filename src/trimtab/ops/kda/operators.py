"""The operators of a KDA layer with their implementations, fastest first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trimtab.ops.checks import check_floating, check_shape, require
from trimtab.ops.conv import short_conv
from trimtab.ops.kda import chunk, mixer, native
from trimtab.ops.kda.reference import kda_reference
from trimtab.ops.norm import gated_rms_norm, l2_norm
from trimtab.ops.registry import Implementation, OpCase, Operator
from trimtab.ops.triton import support as triton

KDAResult = tuple[Tensor, Tensor | None]


def conv_silu_reference(
    x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool
) -> Tensor:
    """Short convolution with SiLU, then where `normed` an L2 norm per head.

    Args:
        x: [T, P], before the convolution.
        weight: [P, 1, k].
        positions: [T] int, index of each token in its sequence.
        head: channels per head.
        normed: whether heads are normed.

    Returns:
        [T, P], normed in at least float32, else in the dtype of x.
    """
    out = short_conv(x, weight, positions)
    return l2_norm(out.unflatten(-1, (-1, head))).flatten(-2) if normed else out


def _kda_case(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> OpCase:
    for name, x in {"q": q, "k": k, "v": v}.items():
        check_shape(f"kda.{name}", x, "B T H V" if name == "v" else "B T H K")
    b, t, h, key = k.shape
    return OpCase(q.device.type, q.dtype, {"B": b, "T": t, "H": h, "K": key, "V": v.shape[-1]})


def _kda_fla(*args: Any, **kwargs: Any) -> KDAResult:
    from trimtab.ops.triton.fla import kda_fla

    return kda_fla(*args, **kwargs)


def _kda_triton(*args: Any, **kwargs: Any) -> KDAResult:
    from trimtab.ops.triton.kda import kda_triton

    return kda_triton(*args, **kwargs)


def _conv_case(x: Tensor, weight: Tensor, positions: Tensor, head: int, normed: bool) -> OpCase:
    del normed
    check_shape("conv_silu.x", x, "T P")
    tokens, width = x.shape
    check_floating("conv_silu.x", x)
    check_shape("conv_silu.weight", weight, "P 1 k", {"P": width, "1": 1})
    check_shape("conv_silu.positions", positions, "T", {"T": tokens})
    whole = head > 0 and width % head == 0
    require(whole, "conv_silu.head", f"must divide the {width} channels", head)
    shapes = {"T": tokens, "H": width // head, "K": head, "taps": weight.shape[-1]}
    return OpCase(x.device.type, x.dtype, shapes)


def _norm_case(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> OpCase:
    del eps
    check_shape("gated_norm.x", x, "T H V")
    sizes = dict(zip("THV", x.shape, strict=True))
    check_shape("gated_norm.gate", gate, "T H V", sizes)
    check_shape("gated_norm.weight", weight, "V", sizes)
    return OpCase(gate.device.type, gate.dtype, sizes)


KDA: Operator[..., KDAResult] = Operator(
    "kda", _kda_case,
    (
        Implementation("fla", _kda_fla, triton.supports_fla),
        Implementation("triton", _kda_triton, triton.supports),
        Implementation("native", native.kda_native, native.supports, native.workspace_bytes),
        Implementation("chunk", chunk.kda_chunk, workspace_bytes=chunk.workspace_bytes),
        Implementation("reference", kda_reference),
    ),
    {"B": 1, "T": 4096, "H": 8, "K": 128, "V": 128},
)
CONV_SILU: Operator[[Tensor, Tensor, Tensor, int, bool], Tensor] = Operator(
    "conv_silu", _conv_case,
    (
        Implementation("native", mixer.conv_silu_native, mixer.supports),
        Implementation("reference", conv_silu_reference),
    ),
    {"T": 4096, "H": 8, "K": 128, "taps": 4},
)
GATED_NORM: Operator[[Tensor, Tensor, Tensor, float], Tensor] = Operator(
    "gated_norm", _norm_case,
    (
        Implementation("native", mixer.gated_norm_native, mixer.supports),
        Implementation("reference", gated_rms_norm),
    ),
    {"T": 4096, "H": 8, "V": 128},
)
