"""Manifold-constrained hyper-connections: S parallel residual streams around every block.

    f = X / sqrt(mean(X^2) + norm_eps)  over all S D channels of a token;  m = fn f, cut [S | S | S S]
    pre  = sigmoid(s0 m_pre + b_pre) + eps            x    = sum_i pre_i X_i       the block's input
    post = 2 sigmoid(s1 m_post + b_post)
    A    = sinkhorn( softmax_rows(s2 m_comb + b_comb) + eps )
    X'_j = post_j y + sum_i A_ij X_i                                      with the block's output y

Weights are computed in at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.arch.spec import HyperConnections
from trimtab.ops.checks import check_shape
from trimtab.ops.fused.hyper import hyper_read_fwd, hyper_write_fwd, workspace_bytes
from trimtab.ops.precision import island_dtype
from trimtab.ops.registry import Implementation, OpCase, Operator


@dataclass(frozen=True, slots=True)
class HyperMix:
    """How a block writes.

    Args:
        post: [T, S], share of the block's output in each stream.
        comb: [T, S, S], share of stream i in the new stream j.
    """

    post: Tensor
    comb: Tensor


def sinkhorn(matrix: Tensor, steps: int, eps: float) -> Tensor:
    """Bring rows and columns of positive matrices near sums of 1, the columns last.

        A /= column sums + eps;  then (steps - 1) times  A /= row sums + eps;  A /= column sums + eps

    Args:
        matrix: [..., S, S], positive.
        steps: normalisations of the columns.
        eps: added to every sum.
    """
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def hyper_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: HyperConnections
) -> tuple[Tensor, HyperMix]:
    """Reference: the input of a block, and how its output will be written.

    Args:
        streams: [T, S, D].
        fn: [(2 + S) S, S D].
        base: [(2 + S) S].
        scale: [3], for reading, writing and mixing.
        spec: constants.

    Returns:
        [T, D] in the dtype of the streams, and the mix in at least float32.
    """
    dtype, s = island_dtype(streams), spec.streams
    wide = streams.to(dtype)
    flat = wide.flatten(1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + spec.norm_eps)
    weights = (flat @ fn.to(dtype).mT).split((s, s, s * s), -1)
    parts = zip(weights, scale.to(dtype).unbind(), base.to(dtype).split((s, s, s * s)), strict=True)
    pre, post, comb = (m * factor + bias for m, factor, bias in parts)
    x = ((torch.sigmoid(pre) + spec.eps).unsqueeze(-1) * wide).sum(1)
    mixing = torch.softmax(comb.unflatten(-1, (s, s)), -1) + spec.eps
    mix = HyperMix(2 * torch.sigmoid(post), sinkhorn(mixing, spec.sinkhorn_steps, spec.eps))
    return x.to(streams.dtype), mix


def hyper_write(streams: Tensor, y: Tensor, mix: HyperMix) -> Tensor:
    """Reference: the streams after a block; the weights are rounded to the activation dtype first.

    Args:
        streams: [T, S, D], as they were read.
        y: [T, D], the block's output.
        mix: of the read.

    Returns:
        [T, S, D] in the dtype of the streams.
    """
    dtype = island_dtype(streams)
    post, comb = (w.to(streams.dtype).to(dtype) for w in (mix.post, mix.comb))
    mixed = comb.mT @ streams.to(dtype)
    return (mixed + post.unsqueeze(-1) * y.to(dtype).unsqueeze(1)).to(streams.dtype)


def _fused_read(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: HyperConnections
) -> tuple[Tensor, HyperMix]:
    constants = (spec.sinkhorn_steps, spec.eps, spec.norm_eps)
    x, post, comb, _, _ = hyper_read_fwd(streams, fn, base, scale, *constants)
    return x, HyperMix(post, comb)


def _fused_write(streams: Tensor, y: Tensor, mix: HyperMix) -> Tensor:
    out: Tensor = hyper_write_fwd(streams, y, mix.post, mix.comb)
    return out


def _streams_case(name: str, streams: Tensor) -> OpCase:
    check_shape(f"{name}.streams", streams, "T S D")
    t, s, d = streams.shape
    return OpCase(streams.device.type, streams.dtype, {"T": t, "S": s, "D": d})


def hyper_read_case(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: HyperConnections
) -> OpCase:
    """The case of a read, after its arguments were checked.

    Raises:
        OperatorError: TT111, a shape is wrong.
    """
    case = _streams_case("hyper_read", streams)
    check_shape("hyper_read.streams", streams, "T S D", {"S": spec.streams})
    sizes = {"M": spec.num_weights, "SD": spec.streams * case.shapes["D"]}
    check_shape("hyper_read.fn", fn, "M SD", sizes)
    check_shape("hyper_read.base", base, "M", sizes)
    check_shape("hyper_read.scale", scale, "3", {"3": 3})
    return case


def hyper_write_case(streams: Tensor, y: Tensor, mix: HyperMix) -> OpCase:
    """The case of a write, after its arguments were checked.

    Raises:
        OperatorError: TT111, a shape is wrong.
    """
    case = _streams_case("hyper_write", streams)
    check_shape("hyper_write.y", y, "T D", case.shapes)
    check_shape("hyper_write.post", mix.post, "T S", case.shapes)
    check_shape("hyper_write.comb", mix.comb, "T S S", case.shapes)
    return case


_TYPICAL = {"T": 4096, "S": 4, "D": 4096}

HYPER_READ: Operator[
    [Tensor, Tensor, Tensor, Tensor, HyperConnections], tuple[Tensor, HyperMix]
] = Operator(
    "hyper_read", hyper_read_case,
    (
        Implementation(
            "one_pass", _fused_read, workspace_bytes=lambda case: workspace_bytes(case.shapes)
        ),
        Implementation("reference", hyper_mix),
    ),
    _TYPICAL,
)
HYPER_WRITE: Operator[[Tensor, Tensor, HyperMix], Tensor] = Operator(
    "hyper_write", hyper_write_case,
    (
        Implementation(
            "one_pass", _fused_write, workspace_bytes=lambda case: workspace_bytes(case.shapes)
        ),
        Implementation("reference", hyper_write),
    ),
    _TYPICAL,
)
