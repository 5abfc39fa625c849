"""Gated activations in blocks, and products with a bfloat16 weight, beside plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes
from trimtab.arch.spec import ActivationSpec
from trimtab.ops.activation import ACTIVATION, gated_activation
from trimtab.ops.precision import linear

SITU = ActivationSpec("situ", 4.0, 25.0)
Step = Callable[[], list[Tensor]]


def activation(side: str, tokens: int, width: int, dtype: str) -> Step:
    """SiTU, one forward and backward pass."""
    torch.manual_seed(0)
    op = {"blocks": ACTIVATION, "equation": gated_activation}[side]
    gate, up = (torch.randn(tokens, width).to(getattr(torch, dtype)).requires_grad_() for _ in "ab")
    grad = torch.randn(tokens, width).to(gate.dtype)

    def step() -> list[Tensor]:
        out = op(SITU, gate, up)
        return [out, *torch.autograd.grad(out, (gate, up), grad)]

    return step


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """The weight upcast as a whole, which autograd keeps."""
    return torch.nn.functional.linear(x, weight.to(x.dtype))


def product(side: str, tokens: int, width: int, dtype: str) -> Step:
    """x W^T and the gradient of x, frozen bfloat16 weight [width, width]."""
    torch.manual_seed(0)
    op = {"blocks": linear, "equation": whole}[side]
    weight = torch.randn(width, width).mul_(width**-0.5).bfloat16()
    x = torch.randn(tokens, width).to(getattr(torch, dtype)).requires_grad_()

    def step() -> list[Tensor]:
        out = op(x, weight)
        return [out, *torch.autograd.grad(out, x, out.detach())]

    return step


def _warmed(build: Callable[..., Step], side: str, *sizes: int) -> Step:
    build(side, 2, 8, "float32")()
    return build(side, *sizes, "float32")


def _compare(
    case: str, build: Callable[..., Step], sizes: tuple[int, int], limits: tuple[float, float]
) -> list[Result]:
    mine, exact = build("blocks", 33, 48, "float32")(), build("equation", 33, 48, "float64")()
    errors = [(a.detach() - b.detach()).abs().max() / b.detach().abs().max() for a, b in zip(mine, exact, strict=True)]
    error = float(torch.stack(errors).max())
    assert error < 1e-5, error
    times = interleave({side: build(side, *sizes, "float32") for side in ("blocks", "equation")}, 5)
    ours, theirs = times["blocks"].median, times["equation"].median
    peak, peer = (peak_extra_bytes(_warmed, build, side, *sizes) for side in ("blocks", "equation"))
    return [
        Result(
            case, "speed over plain autograd", theirs / ours, limits[0],
            details={"seconds": ours, "peer_seconds": theirs, "error": error},
        ),
        Result(
            case, "memory of plain autograd over ours", peer / peak, limits[1],
            details={"extra_mib": peak / MIB, "peer_mib": peer / MIB},
        ),
    ]


def run() -> list[Result]:
    return [
        *_compare("situ fwd+bwd T2048 F4096", activation, (2048, 4096), (1.0, 1.5)),
        *_compare("bf16 weight, fwd+dx, T512 4096x4096", product, (512, 4096), (0.95, 2.0)),
    ]
