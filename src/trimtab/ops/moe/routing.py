"""Token-choice routing with a selection bias and optional groups.

    s = sigmoid(logits);  c = s + bias             the bias only affects the selection
    idx = top-A of c (within the best groups);  w = s[idx]
    w <- w / (sum w + 1e-20) if renormalised;  w <- w * scale
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.ops.checks import check_floating, check_shape, require


@dataclass(frozen=True, slots=True)
class RouterRule:
    """The constants of a router: A experts of E, in `groups` of which `topk_groups` are kept."""

    top_k: int
    groups: int
    topk_groups: int
    renormalise: bool
    scale: float


@torch.no_grad()
def select_experts(scores: Tensor, bias: Tensor, rule: RouterRule) -> Tensor:
    """Ids of the selected experts.

    Args:
        scores: [T, E], after the sigmoid.
        bias: [E].
        rule: constants.

    Returns:
        [T, A] int64, ascending in each row, so that sums over experts have one order.

    Raises:
        OperatorError: TT111, a shape or dtype is wrong, or fewer than A experts are open.
    """
    check_shape("router.scores", scores, "T E")
    check_floating("router.scores", scores)
    experts = scores.shape[1]
    check_shape("router.bias", bias, "E", {"E": experts})
    require(experts % rule.groups == 0, "router.groups", f"must divide the {experts} experts", rule.groups)
    opened = experts if rule.groups == 1 else experts // rule.groups * rule.topk_groups
    require(rule.top_k <= opened, "router.top_k", f"must be at most the {opened} open experts", rule.top_k)
    choice = scores + bias.to(scores.dtype)
    if rule.groups > 1:
        grouped = choice.unflatten(-1, (rule.groups, -1))
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
        kept = top_indices(group_score, rule.topk_groups)
        closed = torch.ones_like(group_score, dtype=torch.bool).scatter_(-1, kept, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    return top_indices(choice, rule.top_k).sort(dim=-1).values


def expert_weights(scores: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    """Weights [T, A] of the selected experts; the gradient flows through the scores."""
    weights = scores.gather(-1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scale


def top_indices(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last dimension, in any order.

    Of equal values the lowest index wins, which only a stable sort promises; few rows need it.
    """
    best = values.topk(k, dim=-1, sorted=False)
    least = best.values.amin(-1, keepdim=True)
    tied = (values >= least).sum(-1) > k
    if bool(tied.any()):
        rows = values[tied]
        best.indices[tied] = torch.sort(rows, dim=-1, descending=True, stable=True).indices[..., :k]
    return best.indices
