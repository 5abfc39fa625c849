"""Hyper-connections against plain loops over streams."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.compare import relative_error
from trimtab.arch.spec import HyperConnections
from trimtab.errors import OperatorError
from trimtab.ops.fused import hyper as fused
from trimtab.ops.hyper import (
    HYPER_READ,
    HYPER_WRITE,
    HyperMix,
    hyper_mix,
    hyper_write,
    sinkhorn,
)
from trimtab.verify.tolerances import limit

SPEC = HyperConnections(streams=4, sinkhorn_steps=20, eps=1e-6, norm_eps=1e-5)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_one_token_by_hand() -> None:
    s, d = 4, 6
    streams, fn, base, scale = draw(1, s, d), draw(24, s * d), draw(24), draw(3)
    y = draw(1, d)
    flat = streams.flatten().tolist()
    root = math.sqrt(sum(v * v for v in flat) / len(flat) + SPEC.norm_eps)
    m = [sum(w * v / root for w, v in zip(row, flat, strict=True)) for row in fn.tolist()]
    b, (s0, s1, s2) = base.tolist(), scale.tolist()
    pre = [sigmoid(m[i] * s0 + b[i]) + SPEC.eps for i in range(s)]
    post = [2 * sigmoid(m[4 + i] * s1 + b[4 + i]) for i in range(s)]
    a = [[math.exp(m[8 + 4 * i + j] * s2 + b[8 + 4 * i + j]) for j in range(s)] for i in range(s)]
    a = [[v / sum(row) + SPEC.eps for v in row] for row in a]
    for step in range(2 * SPEC.sinkhorn_steps - 1):
        if step % 2:
            a = [[v / (sum(row) + SPEC.eps) for v in row] for row in a]
        else:
            sums = [sum(row[j] for row in a) + SPEC.eps for j in range(s)]
            a = [[row[j] / sums[j] for j in range(s)] for row in a]
    x, mix = hyper_mix(streams, fn, base, scale, SPEC)
    want = sum(pre[i] * streams[0, i] for i in range(s))
    assert relative_error(x[0], want) < 1e-13
    new = torch.stack(
        [post[j] * y[0] + sum(a[i][j] * streams[0, i] for i in range(s)) for j in range(s)]
    )
    assert relative_error(hyper_write(streams, y, mix)[0], new) < 1e-13


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_the_last_step_of_sinkhorn_is_the_columns(steps: int) -> None:
    found = sinkhorn(draw(5, 4, 4).exp(), steps, 0.0)
    assert relative_error(found.sum(-2), torch.ones(5, 4)) < 1e-14
    rows = (found.sum(-1) - 1).abs().max()
    assert (rows < 1e-3) == (steps == 20)


def test_the_write_rounds_its_weights_to_the_activation_dtype() -> None:
    mix = HyperMix(torch.full((1, 4), 1 + 2**-10), torch.eye(4).expand(1, 4, 4) * (1 + 2**-10))
    streams, y = torch.ones(1, 4, 3, dtype=torch.bfloat16), torch.ones(1, 3, dtype=torch.bfloat16)
    for write in (hyper_write, HYPER_WRITE):
        assert torch.equal(write(streams, y, mix), torch.full_like(streams, 2))


def leaves(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Streams, fn, base, scale and a block's output."""
    shapes = ((tokens, 4, 5), (24, 20), (24,), (3,), (tokens, 5))
    return [draw(*shape).to(dtype).requires_grad_() for shape in shapes]


def block(read, write, streams, fn, base, scale, y):
    x, mix = read(streams, fn, base, scale, SPEC)
    return write(streams, y * x, mix)


def gradients(read, write, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = block(read, write, *inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def test_every_weight_gets_its_gradient() -> None:
    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return block(hyper_mix, hyper_write, *inputs)

    assert torch.autograd.gradcheck(run, leaves(3))


@pytest.mark.parametrize("tokens", [0, 1, 63, 65])
def test_one_pass_equals_the_equation(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_BLOCK_ELEMENTS", 16 * 20)
    monkeypatch.setattr(fused, "_SINKHORN_TOKENS", 7)
    mine = gradients(HYPER_READ, HYPER_WRITE, leaves(tokens))
    exact = gradients(hyper_mix, hyper_write, leaves(tokens))
    for found, expected in zip(mine, exact, strict=True):
        assert relative_error(found, expected) <= limit("residual.float64")


def test_one_pass_rounds_to_bfloat16_where_the_equation_does() -> None:
    mine = gradients(HYPER_READ, HYPER_WRITE, leaves(20, torch.bfloat16))
    plain = gradients(hyper_mix, hyper_write, leaves(20, torch.bfloat16))
    for found, expected in zip(mine, plain, strict=True):
        assert found.dtype is torch.bfloat16
        assert relative_error(found, expected) <= 2**-6


def test_frozen_weights_get_no_gradient() -> None:
    streams, fn, base, scale, y = leaves(3)
    fn.requires_grad_(False)
    block(HYPER_READ, HYPER_WRITE, streams, fn, base, scale, y).sum().backward()
    assert fn.grad is None and streams.grad is not None and base.grad is not None


def test_wrong_arguments_are_named() -> None:
    streams, fn, base, scale, y = leaves(3)
    with pytest.raises(OperatorError, match=r"hyper_read.fn .*M=24, SD=20"):
        HYPER_READ(streams, fn[:, 1:], base, scale, SPEC)
    with pytest.raises(OperatorError, match=r"hyper_read.streams .*S=4"):
        HYPER_READ(streams[:, :3], fn, base, scale, SPEC)
    _, mix = HYPER_READ(streams, fn, base, scale, SPEC)
    with pytest.raises(OperatorError, match=r"hyper_write.y .*T=3, D=5"):
        HYPER_WRITE(streams, y[1:], mix)
