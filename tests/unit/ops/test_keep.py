"""Results that selective recomputation keeps: given back unchanged, computed once, freed with the graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimtab.models.context import ForwardContext, Recompute
from trimtab.models.decoder import _passes
from trimtab.ops.keep import KeptResults, keeping

Run = Callable[[Tensor], Tensor]


class Cubed(torch.autograd.Function):
    """x^3 from a function whose results can be kept."""

    compute: Callable[..., Tensor]

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return Cubed.compute(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * 3 * x.square()


@pytest.fixture
def calls() -> list[int]:
    """Grows by one each time the function really computes."""
    found: list[int] = []

    def compute(x: Tensor) -> Tensor:
        found.append(1)
        return x**3

    Cubed.compute = staticmethod(keeping(compute))
    return found


def layer(recompute: Recompute) -> Run:
    ctx = ForwardContext.packed([1], recompute=recompute)

    def inside(x: Tensor) -> Tensor:
        return Cubed.apply(x).sin() + Cubed.apply(2 * x).sin()  # type: ignore[no-untyped-call,no-any-return]

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(inside, x, use_reentrant=False, context_fn=lambda: _passes(ctx))
        return y

    return run


@pytest.mark.parametrize(("recompute", "computed"), [("layer", 4), ("selective", 2)])
def test_kept_results_are_computed_once_and_give_the_same_gradient(
    calls: list[int], recompute: Recompute, computed: int
) -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    layer(recompute)(x).sum().backward()
    assert len(calls) == computed
    y = x.detach()
    expected = 3 * y**2 * torch.cos(y**3) + 24 * y**2 * torch.cos(8 * y**3)
    assert x.grad is not None
    assert torch.allclose(x.grad, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("recompute", ["layer", "selective"])
def test_a_graph_that_is_kept_is_recomputed_as_often_as_it_is_asked_for(
    calls: list[int], recompute: Recompute
) -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    total = layer(recompute)(x).sum()
    first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_kept_results_hold_no_graph_and_go_with_it(calls: list[int]) -> None:
    kept = KeptResults()
    with kept.recording():
        y = Cubed.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
    node, results = weakref.ref(y.grad_fn), weakref.ref(kept)
    with kept.replaying():
        assert not Cubed.compute(torch.zeros(3)).requires_grad
    assert len(calls) == 1
    del y
    assert node() is None
    del kept
    assert results() is None


def test_outside_nothing_is_kept(calls: list[int]) -> None:
    for _ in range(2):
        Cubed.apply(torch.ones(3))  # type: ignore[no-untyped-call]
    assert len(calls) == 2
