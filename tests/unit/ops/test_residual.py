"""The mix of attention residuals in one pass: outputs, every gradient, refused arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracles import naive_ops
from tests.support.compare import relative_error
from trimtab.errors import OperatorError
from trimtab.ops.fused import attn_res
from trimtab.ops.residual import ATTN_RES, attn_res_mix
from trimtab.verify.tolerances import limit

EPS = 1e-5


def draw(tokens: int, width: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """`count` rows, then a query."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, width)] * count + [(width,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def gradients(op, leaves: list[Tensor], frozen: tuple[int, ...] = ()) -> list[Tensor | None]:
    """The mix, then the gradient of every row and of the query."""
    leaves = [x.clone().requires_grad_(j not in frozen) for j, x in enumerate(leaves)]
    out = op(leaves[:-1], leaves[-1], EPS)
    # The same incoming gradient in every dtype.
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.bfloat16)
    out.backward(grad.to(out.dtype).view_as(out))
    return [out, *(x.grad for x in leaves)]


def test_the_equation_is_the_naive_one():
    *rows, norm = draw(5, 8, 4)
    proj = draw(5, 8, 0)[0].unsqueeze(0)
    expected = naive_ops.attn_res_mix(rows, norm, proj, EPS)
    assert relative_error(attn_res_mix(rows, norm * proj[0], EPS), expected) <= limit("residual.float64")


@pytest.mark.parametrize("tokens", [1, 63, 65])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_one_pass_equals_the_equation(tokens, count, monkeypatch):
    monkeypatch.setattr(attn_res, "_BLOCK_ELEMENTS", 16 * 8)
    leaves = draw(tokens, 8, count)
    for mine, expected in zip(
        gradients(ATTN_RES, leaves), gradients(attn_res_mix, leaves), strict=True
    ):
        assert relative_error(mine, expected) <= limit("residual.float64")


def test_what_is_frozen_gets_no_gradient():
    leaves = draw(5, 8, 3)
    found = gradients(ATTN_RES, leaves, frozen=(1, 3))
    expected = gradients(attn_res_mix, leaves, frozen=(1, 3))
    assert found[2] is None and found[4] is None
    for j in (1, 3):
        assert relative_error(found[j], expected[j]) <= limit("residual.float64")


def test_scores_far_apart_stay_finite():
    *rows, query = draw(4, 8, 3)
    found = gradients(ATTN_RES, [*rows, query * 1e6])
    assert all(torch.isfinite(x).all() for x in found)


def test_bfloat16_rounds_the_result_once():
    leaves = draw(20, 16, 4, torch.bfloat16)
    exact = gradients(attn_res_mix, [x.double() for x in leaves])
    for mine, expected in zip(gradients(ATTN_RES, leaves), exact, strict=True):
        assert mine.dtype is torch.bfloat16
        assert relative_error(mine, expected) <= 2**-8


def test_nothing_but_rows_and_three_numbers_per_row_is_saved():
    saved: list[Tensor] = []
    leaves = [x.requires_grad_() for x in draw(50, 64, 4)]

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ATTN_RES(leaves[:-1], leaves[-1], EPS)
    fresh = [x for x in saved if not any(x is leaf for leaf in leaves)]
    assert [tuple(x.shape) for x in fresh] == [(3, 4, 50)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, q: ([], q), "rows .*at least one"),
        (lambda rows, q: ([rows[0], rows[1][1:]], q), r"rows\[1\] .*\[T=4, D=8\]"),
        (lambda rows, q: ([rows[0], rows[1].float()], q), r"rows\[1\] .*float64"),
        (lambda rows, q: (rows, q[:3]), r"query .*\[D=8\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    *rows, query = draw(4, 8, 2)
    with pytest.raises(OperatorError, match=message):
        ATTN_RES(*change(rows, query), EPS)
