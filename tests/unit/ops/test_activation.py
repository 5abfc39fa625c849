"""Gated activations in blocks: values, both gradients, what is saved, refused arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import relative_error
from trimtab.arch.spec import ActivationSpec
from trimtab.errors import OperatorError
from trimtab.ops.activation import ACTIVATION, gated_activation
from trimtab.ops.fused import activation as blocks
from trimtab.verify.tolerances import limit

SPECS = [
    ActivationSpec("situ", 4.0, 25.0),
    ActivationSpec("situ", 4.0, None),
    ActivationSpec("swiglu"),
    ActivationSpec("swiglu", clamp=1.0),
]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    gate, up = (3 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return gate.to(dtype), up.to(dtype)


def gradients(op, spec: ActivationSpec, gate: Tensor, up: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    out = op(spec, *leaves)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.bfloat16).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad.view_as(out))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (65, 6), (3, 4, 6), (6,)], ids=str)
def test_blocks_equal_the_equation(spec, shape, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS", 4 * 6)
    inputs = draw(*shape)
    mine, exact = (gradients(op, spec, *inputs) for op in (ACTIVATION, gated_activation))
    for found, expected in zip(mine, exact, strict=True):
        assert relative_error(found, expected) <= limit("activation.float64")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bfloat16_is_rounded_once(spec):
    gate, up = draw(33, 16, dtype=torch.bfloat16)
    exact = gradients(gated_activation, spec, gate.double(), up.double())
    for found, expected in zip(gradients(ACTIVATION, spec, gate, up), exact, strict=True):
        assert found.dtype is torch.bfloat16
        assert relative_error(found, expected) <= 2**-8


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_huge_inputs_stay_finite(spec):
    big = torch.tensor([1e30, -1e30, 1e30, -1e30])
    found = gradients(ACTIVATION, spec, big, big.flip(0) if spec.kind == "situ" else big / 1e30)
    assert all(torch.isfinite(x).all() for x in found[:2])


def test_halves_of_one_tensor_need_no_copy():
    both = torch.cat(draw(5, 6), -1).requires_grad_()
    found = ACTIVATION(SPECS[0], *both.chunk(2, -1))
    assert relative_error(found, gated_activation(SPECS[0], *both.chunk(2, -1))) <= limit("activation.float64")


def test_only_gate_and_up_are_saved():
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    gate, up = (x.requires_grad_() for x in draw(5, 6))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ACTIVATION(SPECS[0], gate, up)
    assert [x is y for x, y in zip(saved, (gate, up), strict=True)] == [True, True]


def test_wrong_arguments_are_named():
    gate, up = draw(5, 6)
    with pytest.raises(OperatorError, match=r"activation.up .*\[5, 6\]"):
        ACTIVATION(SPECS[0], gate, up[1:])
    with pytest.raises(OperatorError, match=r"activation.up .*float64"):
        ACTIVATION(SPECS[0], gate, up.float())
