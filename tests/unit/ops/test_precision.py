"""Matrix products with weights of another dtype: values, gradients, and no second copy of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import relative_error
from trimtab.ops import precision
from trimtab.ops.precision import linear
from trimtab.verify.tolerances import limit


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """The whole weight upcast, the product in float64."""
    return x.double() @ weight.double().mT


@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (2, 5, 6)], ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_blocks_of_an_upcast_weight_equal_the_whole(shape, trained, monkeypatch):
    monkeypatch.setattr(precision, "_BLOCK_ELEMENTS", 4 * 6)  # 9 output rows are no multiple of 4
    weight = draw(9, 6, dtype=torch.bfloat16)
    for op in (linear, plain):
        x = draw(*shape).requires_grad_()
        leaf = weight.clone().requires_grad_(trained)
        out = op(x, leaf)
        out.backward(torch.ones_like(out))
        if op is linear:
            found = [out, x.grad, leaf.grad]
            continue
        for mine, expected in zip(found[:2], (out, x.grad), strict=True):
            assert relative_error(mine, expected) <= limit("linear.float64")
        assert (found[2] is None) == (not trained)
        if trained:
            assert relative_error(found[2], leaf.grad) <= 2**-8  # rounded to bfloat16 once


def test_bfloat16_activations_are_rounded_once_per_product():
    x, weight = draw(7, 32, dtype=torch.bfloat16), draw(9, 32, dtype=torch.bfloat16)
    out = linear(x, weight)
    assert out.dtype is torch.bfloat16
    assert relative_error(out, plain(x, weight)) <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_weight_keeps_neither_a_wide_copy_nor_the_activations(dtype):
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    x, weight = draw(50, 32, dtype=dtype).requires_grad_(), draw(9, 32, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        linear(x * 1, weight)
    assert sum(t.numel() for t in saved if t is not weight) == 0


def test_shapes_are_known_without_memory():
    x = torch.empty(3, 4, 32, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(9, 32, device="meta", dtype=torch.bfloat16)
    assert precision.upcast_linear_fwd(x, weight).shape == (3, 4, 9)
