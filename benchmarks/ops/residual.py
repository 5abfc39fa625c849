"""Attention residuals beside a stacked bank, hyper-connections beside their equation, float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes
from trimtab.arch.spec import HyperConnections
from trimtab.ops.hyper import HYPER_READ, HYPER_WRITE, hyper_mix, hyper_write
from trimtab.ops.residual import ATTN_RES

SPEC = HyperConnections(streams=4, sinkhorn_steps=20, eps=1e-6, norm_eps=1e-5)


def stacked(rows: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """What one writes first: one tensor [m, T, D], normed and mixed."""
    bank = torch.stack(list(rows))
    normed = bank * torch.rsqrt(bank.square().mean(-1, keepdim=True) + eps)
    weights = torch.softmax(normed @ query, 0)
    return (weights.unsqueeze(-1) * bank).sum(0)


def attn_res(side: str, tokens: int, width: int, rows: int, dtype: str) -> Callable[[], list[Tensor]]:
    """One forward and backward pass over a bank made beforehand."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    bank = [torch.randn(tokens, width).to(kind).requires_grad_() for _ in range(rows)]
    query, grad = (torch.randn(width) / width**0.5).to(kind), torch.randn(tokens, width).to(kind)
    op = {"one_pass": ATTN_RES, "stacked": stacked}[side]

    def step() -> list[Tensor]:
        out = op(bank, query, 1e-5)
        return [out, *torch.autograd.grad(out, bank, grad)]

    return step


def hyper(side: str, tokens: int, width: int, dtype: str) -> Callable[[], list[Tensor]]:
    """One read and write, forward and backward."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    s, m = SPEC.streams, SPEC.num_weights
    streams = torch.randn(tokens, s, width).to(kind).requires_grad_()
    y = torch.randn(tokens, width).to(kind).requires_grad_()
    fn = (torch.randn(m, s * width) / (s * width) ** 0.5).to(kind)
    base, scale = torch.randn(m).to(kind), torch.randn(3).to(kind)
    read, write = {"one_pass": (HYPER_READ, HYPER_WRITE), "equation": (hyper_mix, hyper_write)}[side]

    def step() -> list[Tensor]:
        x, mix = read(streams, fn, base, scale, SPEC)
        out = write(streams, y, mix)
        return [out, *torch.autograd.grad((x, out), (streams, y), (x.detach(), out.detach()))]

    return step


def _check(build: Callable[..., Callable[[], list[Tensor]]], peer: str, *sizes: int) -> float:
    """Largest relative error of outputs and gradients against the peer in float64."""
    mine, exact = build("one_pass", *sizes, "float32")(), build(peer, *sizes, "float64")()
    errors = [(a.detach() - b.detach()).abs().max() / b.detach().abs().max() for a, b in zip(mine, exact, strict=True)]
    error = float(torch.stack(errors).max())
    assert error < 1e-4, error
    return error


def _warmed(
    build: Callable[..., Callable[[], list[Tensor]]], side: str, *sizes: int
) -> Callable[[], list[Tensor]]:
    """After a small pass that brings in the libraries."""
    build(side, 2, 8, *sizes[2:], "float32")()
    return build(side, *sizes, "float32")


def _compare(
    name: str, build: Callable[..., Callable[[], list[Tensor]]], peer: str, sizes: tuple[int, ...],
    limits: tuple[float, float],
) -> list[Result]:
    error = _check(build, peer, 33, 64, *sizes[2:])
    times = interleave({s: build(s, *sizes, "float32") for s in ("one_pass", peer)}, 5)
    ours, theirs = times["one_pass"].median, times[peer].median
    peak, other = (peak_extra_bytes(_warmed, build, s, *sizes) for s in ("one_pass", peer))
    return [
        Result(
            name, f"speed over {peer}", theirs / ours, limits[0],
            details={"seconds": ours, "peer_seconds": theirs, "error": error},
        ),
        Result(
            name, f"memory of {peer} over ours", other / peak, limits[1],
            details={"extra_mib": peak / MIB, "peer_mib": other / MIB},
        ),
    ]


def run() -> list[Result]:
    return [
        *_compare("attn_res fwd+bwd T2048 D2048 m9", attn_res, "stacked", (2048, 2048, 9), (1.0, 2.0)),
        *_compare("hyper read+write fwd+bwd T2048 S4 D2048", hyper, "equation", (2048, 2048), (1.0, 1.0)),
    ]
