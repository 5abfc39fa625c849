"""Routing against its definition."""

from __future__ import annotations

import torch

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
