"""Custom operators: values, gradients, shapes without values, and a first call that loads nothing."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.ops.custom import custom_op


@custom_op("trimtab::test_scaled")
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, d: (d * ctx.factor, None), setup_context=keep)


def test_values_gradients_and_shapes():
    x = torch.arange(3.0, requires_grad=True)
    out = scaled(x, 2.0)
    out.sum().backward()
    assert out.tolist() == [0, 2, 4] and x.grad is not None and x.grad.tolist() == [2, 2, 2]
    with FakeTensorMode() as mode:
        assert scaled(mode.from_tensor(x), 2.0).shape == x.shape
    assert torch.ops.trimtab.test_scaled(x, 3.0).tolist() == [0, 3, 6]


def test_calling_an_operator_does_not_load_the_compiler():
    code = (
        "import sys, torch\n"
        "from trimtab.ops.kda.chunk import kda_chunk\n"
        "x = [torch.rand(1, 4, 1, 8, requires_grad=True) for _ in range(3)]\n"
        "out, _ = kda_chunk(*x, -torch.rand(1, 4, 1, 8), torch.rand(1, 4, 1), 1.0)\n"
        "out.sum().backward()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
