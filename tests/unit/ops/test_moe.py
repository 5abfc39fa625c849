"""Routing and grouped experts against their definitions."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import relative_error
from trimtab.arch.quantization import PackedForm
from trimtab.arch.spec import ActivationSpec, MoESpec
from trimtab.models.moe import Experts, gated_activation
from trimtab.models.packed import PackedWeight
from trimtab.ops import mxfp4
from trimtab.ops.moe.reference import experts_reference
from trimtab.ops.moe.routing import RouterRule, expert_weights, select_experts
from trimtab.verify.tolerances import limit

SITU = ActivationSpec("situ", 4.0, 25.0)
SPEC = MoESpec(6, 2, 32, 0, SITU, True, 1.0)


MXFP4 = PackedForm("mxfp4", (1, 32))


def experts(trainable: bool) -> Experts:
    generator = torch.Generator().manual_seed(1)
    module = Experts(SPEC, 32, torch.float64)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module.requires_grad_(trainable)


def routed(ids: list[list[int]]):
    tensor = torch.tensor(ids)
    counts = torch.bincount(tensor.flatten(), minlength=6).tolist()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(ids), 32, generator=generator, dtype=torch.float64)
    weights = torch.rand(len(ids), 2, generator=generator, dtype=torch.float64)
    return x, tensor, weights, counts


CASES = {
    "spread": [[0, 3], [1, 2], [3, 5], [0, 4], [2, 5]],
    "one pair takes all": [[2, 4]] * 5,
    "single token": [[0, 5]],
}


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_grouped_experts_equal_the_loop_over_tokens(case, trainable):
    module = experts(trainable)
    x, ids, weights, counts = routed(CASES[case])

    def run(grouped: bool):
        module.zero_grad()
        xs, ws = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if grouped:
            out = module(xs, ids, ws, counts)
        else:
            out = experts_reference(
                xs, ids, ws, module.gate_up.weight, module.down.weight,
                lambda g, u: gated_activation(SITU, g, u),
            )
        out.square().sum().backward()
        grads = [p.grad.clone() for p in module.parameters()] if trainable else []
        return [out, xs.grad, ws.grad, *grads]

    for found, expected in zip(run(True), run(False), strict=True):
        assert relative_error(found, expected) <= limit("experts.float64")


def test_packed_experts_compute_what_their_decoded_form_computes():
    dense = experts(False)
    packed = Experts(SPEC, 32, torch.float64, (MXFP4, MXFP4))
    for name in ("gate_up", "down"):
        weight = getattr(dense, name).weight
        codes, scale = mxfp4.encode(weight)
        weight.data.copy_(mxfp4.decode(codes, scale, torch.float64))
        target = getattr(packed, name)
        assert isinstance(target, PackedWeight)
        target.packed.data.copy_(codes.flatten(1, -2))
        target.scale.data.copy_(scale.flatten(1, -2))
    x, ids, weights, counts = routed(CASES["spread"])
    assert torch.equal(packed(x, ids, weights, counts), dense(x, ids, weights, counts))


def test_the_bias_moves_the_selection_and_not_the_weights():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2]])
    bias = torch.tensor([0.0, -1.0, 1.0, 0.0])
    rule = RouterRule(2, 1, 1, True, 2.0)
    ids = select_experts(scores, bias, rule)
    assert ids.tolist() == [[0, 2]]
    assert torch.allclose(expert_weights(scores, ids, rule), torch.tensor([[1.8, 0.2]]))


def test_only_the_best_groups_are_open():
    # Group scores are sums of the two best of a group: 0.9+0.8, 0.95+0.1, 0.5+0.45.
    scores = torch.tensor([[0.9, 0.8, 0.95, 0.1, 0.5, 0.45]])
    ids = select_experts(scores, torch.zeros(6), RouterRule(2, 3, 1, False, 1.0))
    assert ids.tolist() == [[0, 1]]


def test_equal_scores_pick_the_lowest_experts():
    ids = select_experts(torch.full((1, 8), 0.5), torch.zeros(8), RouterRule(3, 1, 1, True, 1.0))
    assert ids.tolist() == [[0, 1, 2]]
