"""Routing against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trimtab.errors import OperatorError
from trimtab.ops.moe.routing import RouterRule, expert_weights, select_experts


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


def test_equal_groups_open_the_lowest():
    rule = RouterRule(3, 4, 2, True, 1.0)
    ids = select_experts(torch.full((2, 16), 0.5), torch.zeros(16), rule)
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_no_tokens():
    rule = RouterRule(2, 2, 1, True, 1.0)
    scores = torch.empty(0, 8)
    ids = select_experts(scores, torch.zeros(8), rule)
    assert ids.shape == expert_weights(scores, ids, rule).shape == (0, 2)


@pytest.mark.parametrize(("change", "where"), [
    ({"scores": torch.zeros(8)}, "router.scores"),
    ({"scores": torch.zeros(3, 8, dtype=torch.int64)}, "router.scores"),
    ({"bias": torch.zeros(7)}, "router.bias"),
    ({"groups": 3}, "router.groups"),
    ({"top_k": 9}, "router.top_k"),
    ({"groups": 4, "topk_groups": 1, "top_k": 3}, "router.top_k"),
])
def test_wrong_arguments_are_named(change, where):
    tensors = {"scores": torch.zeros(3, 8), "bias": torch.zeros(8)}
    rule = replace(RouterRule(2, 1, 1, True, 1.0), **{n: v for n, v in change.items() if n not in tensors})
    tensors |= {n: v for n, v in change.items() if n in tensors}
    with pytest.raises(OperatorError) as caught:
        select_experts(tensors["scores"], tensors["bias"], rule)
    assert caught.value.where == where
