"""What spreads tokens evenly over experts: a selection bias without gradient, or a loss.

Quantile Balancing is the bias:

    alpha_i = (A+1)-th largest of s_i + b;  r_ij = alpha_i - s_ij      the bias that token i needs for j
    b_j <- A/E quantile of {r_ij}_i;  b <- b - mean b

so that over one global batch every expert gets T A / E tokens. Only histograms of r are kept; they
add up over micro-batches and ranks.

Source: equations 13 and 14 of the report that introduced it (section 2.3.3).

The loss is taken per sequence, so that it does not depend on how a batch is cut:

    f_j = E / (A T_n) #(tokens of sequence n that selected j);  P_j = mean_i s_ij / sum_j s_ij
    L_n = sum_j f_j P_j                              1 where the load is even

Source: equations 17 to 20 of arXiv 2412.19437.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.checks import check_floating, check_mask, check_shape, require
from trimtab.ops.precision import island_dtype

BINS = 1000


@torch.no_grad()
def bias_histogram(
    scores: Tensor, bias: Tensor, top_k: int, valid: Tensor | None = None, bins: int = BINS
) -> Tensor:
    """How often each expert needs which bias.

    Args:
        scores: [T, E] after the sigmoid.
        bias: [E], the bias that selected.
        top_k: A, below E.
        valid: [T] bool, False for padding, which does not count.
        bins: of equal width between the bounds of `_bounds`.

    Returns:
        [E, bins] int64.

    Raises:
        OperatorError: TT111, a shape or dtype is wrong, or every expert is chosen.
    """
    check_shape("balance.scores", scores, "T E")
    check_floating("balance.scores", scores)
    tokens, experts = scores.shape
    check_shape("balance.bias", bias, "E", {"E": experts})
    require(0 < top_k < experts, "balance.top_k", f"must be positive and below the {experts} experts", top_k)
    wide = island_dtype(scores)
    s, b = scores.to(wide), bias.to(wide)
    if valid is not None:
        check_mask("balance.valid", valid, tokens)
        s = s[valid]
    alpha = (s + b).topk(top_k + 1, dim=-1).values[:, -1:]
    low, high = _bounds(b)
    index = (((alpha - s) - low) * (bins / (high - low))).long().clamp(0, bins - 1)
    flat = (index + torch.arange(experts, device=s.device) * bins).flatten()
    return torch.bincount(flat, minlength=experts * bins).view(-1, bins)


@torch.no_grad()
def balanced_bias(histogram: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The new bias.

    Args:
        histogram: [E, bins], the sum of `bias_histogram` over the global batch.
        bias: [E], the bias that selected in it.
        top_k: A.

    Returns:
        [E] in the dtype of `bias`, with mean 0; `bias` itself if the batch was empty.

    Raises:
        OperatorError: TT111, the shapes do not fit together.
    """
    check_shape("balance.histogram", histogram, "E bins")
    check_shape("balance.bias", bias, "E", {"E": histogram.shape[0]})
    experts, bins = histogram.shape
    total = int(histogram[0].sum())
    if total == 0:
        return bias.clone()
    wide = island_dtype(bias)
    low, high = _bounds(bias.to(wide))
    wanted = total * top_k / experts
    reached = torch.cumsum(histogram, -1)
    index = (reached < wanted).sum(-1, keepdim=True).clamp(max=bins - 1)
    inside = histogram.gather(-1, index).to(wide)
    before = reached.gather(-1, index).to(wide) - inside
    share = (wanted - before) / inside.clamp(min=1)
    new = low + (index.to(wide) + share).squeeze(-1) * ((high - low) / bins)
    return (new - new.mean()).to(bias.dtype)


def balance_loss(
    scores: Tensor, ids: Tensor, sequences: Tensor, valid: Tensor | None = None
) -> Tensor:
    """sum_n T_n L_n over the sequences of a pack; over their tokens it is the mean of L.

    Args:
        scores: [T, E] after the sigmoid; the gradient flows through them only.
        ids: [T, A] selected experts.
        sequences: [T] int64, number of the sequence of each token, ascending from 0.
        valid: [T] bool, False for padding, which counts in no sequence.

    Returns:
        A scalar in the dtype of `scores`.
    """
    if valid is not None:
        scores, ids, sequences = scores[valid], ids[valid], sequences[valid]
    if not len(ids):
        return scores.sum()
    experts, count = scores.shape[1], int(sequences[-1]) + 1
    cells = (sequences.unsqueeze(1) * experts + ids).flatten()
    load = torch.bincount(cells, minlength=count * experts).view(count, experts)
    lengths = torch.bincount(sequences, minlength=count).clamp(min=1)
    share = load.to(scores.dtype) * (experts / (ids.shape[1] * lengths.to(scores.dtype))).unsqueeze(1)
    return (scores / scores.sum(1, keepdim=True) * share[sequences]).sum()


def _bounds(bias: Tensor) -> tuple[float, float]:
    """Between these lies every needed bias, since scores lie in [0, 1]."""
    return float(bias.min()) - 1.0, float(bias.max()) + 1.0
