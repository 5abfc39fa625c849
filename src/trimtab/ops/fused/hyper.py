"""Reading and writing hyper-connections without wide or normed copies of the streams.

The read keeps the [T, (2+S)S] products m' = X fn^T / rms and the 1/rms of each token; weights and
their Sinkhorn steps are computed again in the backward pass, for a few tokens at a time. With
n = 1/rms, M = S D:

    dX_i = pre_i dx + n (dm fn)_i - n^2 / M <dm, m'> X_i

Letters: T tokens, S streams, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.ops.custom import custom_op
from trimtab.ops.precision import island_dtype

_BLOCK_ELEMENTS = 1 << 18  # of the streams at a time
_SINKHORN_TOKENS = 1024


def workspace_bytes(shapes: Mapping[str, int]) -> int:
    """Bytes beside inputs and outputs of a read or write, either pass.

    Args:
        shapes: T, S, D.
    """
    t, s, d = shapes["T"], shapes["S"], shapes["D"]
    weights = (2 + s) * s
    return 4 * (3 * min(t, _step(s * d)) * s * d + weights * s * d + 4 * t * weights)


@custom_op("trimtab::hyper_read_fwd")
def hyper_read_fwd(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, steps: int, eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Block input [T, D], post [T, S], comb [T, S, S], products m' [T, (2+S)S] and 1/rms [T, 1]."""
    t, s, d = streams.shape
    dtype = island_dtype(streams)
    wide_fn = fn.to(dtype)
    x = streams.new_empty(t, d)
    norms = streams.new_empty(t, 1, dtype=dtype)
    raw = streams.new_empty(t, len(fn), dtype=dtype)
    for part in _parts(t, s * d):
        wide = streams[part].to(dtype)
        flat = wide.reshape(len(wide), -1)
        square = torch.linalg.vector_norm(flat, dim=1, keepdim=True).square_().div_(s * d)
        norms[part] = square.add_(norm_eps).rsqrt_()
        raw[part] = torch.mm(flat, wide_fn.mT).mul_(norms[part])
        pre = _logits(raw[part], base, scale, s)[0].sigmoid().add_(eps)
        x[part] = torch.bmm(pre.unsqueeze(1), wide).squeeze(1)
    _, post, comb = _logits(raw, base, scale, s)
    mixing = torch.softmax(_tokens_last(comb), 1).add_(eps)
    for step in range(2 * steps - 1):  # in place, where the backward pass keeps every one
        mixing.div_(mixing.sum(step % 2, keepdim=True).add_(eps))
    mixed = mixing.permute(2, 0, 1).contiguous()
    return x, post.sigmoid().mul_(2), mixed, raw, norms


def _logits(raw: Tensor, base: Tensor, scale: Tensor, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of reading, writing and mixing, fresh tensors."""
    parts = raw.split((s, s, s * s), 1)
    biases = base.to(raw.dtype).split((s, s, s * s))
    pre, post, comb = (
        m * factor + bias
        for m, factor, bias in zip(parts, scale.to(raw.dtype).unbind(), biases, strict=True)
    )
    return pre, post, comb


def _tokens_last(matrices: Tensor) -> Tensor:
    """[T, S S] -> [S, S, T]: sums over four neighbours in memory are ten times slower than over rows."""
    s = math.isqrt(matrices.shape[1])
    return matrices.mT.contiguous().view(s, s, -1)


def _sinkhorn(matrix: Tensor, steps: int, eps: float) -> list[tuple[Tensor, Tensor, int]]:
    """Every normalisation of `trimtab.ops.hyper.sinkhorn`: (result, sums divided by, dimension).

    Args:
        matrix: [S, S, T].
        steps: normalisations of the columns.
        eps: added to every sum.
    """
    done = []
    for step in range(2 * steps - 1):
        dim = step % 2
        sums = matrix.sum(dim, keepdim=True).add_(eps)
        matrix = matrix / sums
        done.append((matrix, sums, dim))
    return done


@custom_op("trimtab::hyper_read_bwd")
def hyper_read_bwd(
    dx: Tensor, d_post: Tensor, d_comb: Tensor, streams: Tensor, fn: Tensor, base: Tensor,
    scale: Tensor, raw: Tensor, norms: Tensor, steps: int, eps: float, need_fn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, fn ([0] unless needed), base and scale."""
    t, s, d = streams.shape
    dtype = raw.dtype
    d_logits = _weight_grads(d_post, d_comb, raw, base, scale, (steps, eps))
    wide_fn = fn.to(dtype)
    factors = scale.to(dtype).repeat_interleave(torch.tensor([s, s, s * s], device=scale.device))
    d_streams = streams.new_empty(streams.shape)
    d_fn = torch.zeros_like(wide_fn) if need_fn else raw.new_empty(0)
    for part in _parts(t, s * d):
        wide = streams[part].to(dtype)
        flat = wide.reshape(len(wide), -1)
        g = dx[part].to(dtype)
        pre = _logits(raw[part], base, scale, s)[0].sigmoid()
        d_pre = torch.bmm(wide, g.unsqueeze(2)).squeeze(2)
        d_logits[part, :s] = d_pre * pre * (1 - pre)
        d_raw = d_logits[part] * factors
        along = (d_raw * raw[part]).sum(1, keepdim=True) * norms[part].square() / -(s * d)
        d_raw = d_raw * norms[part]
        change = torch.mm(d_raw, wide_fn).addcmul_(along, flat).view_as(wide)
        d_streams[part] = change.baddbmm_((pre + eps).unsqueeze(2), g.unsqueeze(1))
        if need_fn:
            d_fn.addmm_(d_raw.mT, flat)
    d_scale = torch.stack([p.sum() for p in (d_logits * raw).split((s, s, s * s), 1)])
    return d_streams, d_fn.to(fn.dtype), d_logits.sum(0).to(base.dtype), d_scale.to(scale.dtype)


def _weight_grads(
    d_post: Tensor, d_comb: Tensor, raw: Tensor, base: Tensor, scale: Tensor,
    rule: tuple[int, float],
) -> Tensor:
    """[T, (2+S)S], gradients of the logits of writing and mixing; those of reading are left open."""
    s = d_post.shape[1]
    steps, eps = rule
    d_logits = torch.empty_like(raw)
    for start in range(0, len(raw), _SINKHORN_TOKENS):
        part = slice(start, start + _SINKHORN_TOKENS)
        _, post, comb = _logits(raw[part], base, scale, s)
        half = post.sigmoid()
        d_logits[part, s : 2 * s] = d_post[part] * 2 * half * (1 - half)
        share = torch.softmax(_tokens_last(comb), 1)
        g = _tokens_last(d_comb[part].to(raw.dtype).flatten(1))
        for result, sums, dim in reversed(_sinkhorn(share + eps, steps, eps)):
            g = (g - (g * result).sum(dim, keepdim=True)) / sums
        g = share * (g - (g * share).sum(1, keepdim=True))
        d_logits[part, 2 * s :] = g.flatten(0, 1).mT
    return d_logits


@custom_op("trimtab::hyper_write_fwd")
def hyper_write_fwd(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a block, [T, S, D]; weights rounded to the dtype of the streams first."""
    t, s, d = streams.shape
    dtype = island_dtype(streams)
    mixing, share = _rounded(comb, streams), _rounded(post, streams)
    out = streams.new_empty(t, s, d)
    for part in _parts(t, s * d):
        added = share[part].unsqueeze(2) * y[part].to(dtype).unsqueeze(1)
        out[part] = added.baddbmm_(mixing[part].mT, streams[part].to(dtype))
    return out


@custom_op("trimtab::hyper_write_bwd")
def hyper_write_bwd(
    grad: Tensor, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, y, post and comb."""
    t, s, d = streams.shape
    dtype = island_dtype(streams)
    mixing, share = _rounded(comb, streams), _rounded(post, streams)
    d_streams, d_y = streams.new_empty(t, s, d), y.new_empty(t, d)
    d_post, d_comb = torch.empty_like(post), torch.empty_like(comb)
    for part in _parts(t, s * d):
        g, wide = grad[part].to(dtype), streams[part].to(dtype)
        d_streams[part] = torch.bmm(mixing[part], g)
        d_y[part] = torch.bmm(share[part].unsqueeze(1), g).squeeze(1)
        d_post[part] = torch.bmm(g, y[part].to(dtype).unsqueeze(2)).squeeze(2)
        d_comb[part] = torch.bmm(wide, g.mT)
    return d_streams, d_y, d_post, d_comb


def _rounded(weight: Tensor, streams: Tensor) -> Tensor:
    return weight.to(streams.dtype).to(island_dtype(streams))


def _step(width: int) -> int:
    return max(1, _BLOCK_ELEMENTS // width)


def _parts(tokens: int, width: int) -> list[slice]:
    step = _step(width)
    return [slice(start, start + step) for start in range(0, tokens, step)]


@hyper_read_fwd.register_fake
def _fake_read(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, steps: int, eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del base, scale, steps, eps, norm_eps
    t, s, d = streams.shape
    dtype = island_dtype(streams)
    shapes = ((t, s), (t, s, s), (t, fn.shape[0]), (t, 1))
    post, comb, raw, norms = (streams.new_empty(shape, dtype=dtype) for shape in shapes)
    return streams.new_empty(t, d), post, comb, raw, norms


@hyper_read_bwd.register_fake
def _fake_read_bwd(
    dx: Tensor, d_post: Tensor, d_comb: Tensor, streams: Tensor, fn: Tensor, base: Tensor,
    scale: Tensor, raw: Tensor, norms: Tensor, steps: int, eps: float, need_fn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del dx, d_post, d_comb, raw, norms, steps, eps
    d_fn = fn.new_empty(fn.shape if need_fn else 0)
    return streams.new_empty(streams.shape), d_fn, base.new_empty(base.shape), scale.new_empty(3)


@hyper_write_fwd.register_fake
def _fake_write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    del y, post, comb
    return streams.new_empty(streams.shape)


@hyper_write_bwd.register_fake
def _fake_write_bwd(
    grad: Tensor, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del grad
    d_streams, d_y, d_post, d_comb = (x.new_empty(x.shape) for x in (streams, y, post, comb))
    return d_streams, d_y, d_post, d_comb


def _setup_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    streams, fn, base, scale, steps, eps, _ = inputs
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(streams, fn, base, scale, *output[3:])
    ctx.rule = (steps, eps)


def _backward_read(
    ctx: Any, dx: Tensor, d_post: Tensor, d_comb: Tensor, *_: object
) -> tuple[Tensor | None, ...]:
    need_fn = ctx.needs_input_grad[1]
    grads = hyper_read_bwd(dx, d_post, d_comb, *ctx.saved_tensors, *ctx.rule, need_fn)
    d_streams, d_fn, d_base, d_scale = grads
    return d_streams, d_fn if need_fn else None, d_base, d_scale, None, None, None


def _setup_write(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward_write(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = hyper_write_bwd(grad, *ctx.saved_tensors)
    return grads


hyper_read_fwd.register_autograd(_backward_read, setup_context=_setup_read)
hyper_write_fwd.register_autograd(_backward_write, setup_context=_setup_write)
