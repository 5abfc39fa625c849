"""Capacity of experts, and the bias that balances them."""

from __future__ import annotations

import pytest
import torch

from trimtab.errors import OperatorError
from trimtab.ops.moe.balance import balanced_bias, bias_histogram
from trimtab.ops.moe.capacity import capacity_of, drop_beyond
from trimtab.ops.moe.routing import RouterRule, select_experts


def test_tokens_over_the_capacity_are_dropped_in_order():
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    kept, dropped = drop_beyond(ids, 4, 1.0)  # 4 * 2 / 4 = 2 tokens per expert
    assert kept.tolist() == [[0, 1], [0, 2], [4, 3], [4, 1]]
    assert dropped.tolist() == [2, 0, 0, 0]


def test_padding_takes_no_place_and_reaches_no_expert():
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    valid = torch.tensor([False, True, True, True])
    kept, dropped = drop_beyond(ids, 4, 1.0, valid)  # ceil(3 * 2 / 4) = 2
    assert kept.tolist() == [[4, 4], [0, 2], [0, 3], [4, 1]]
    assert dropped.tolist() == [1, 0, 0, 0]


def test_a_large_factor_drops_nothing():
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(50)])
    kept, dropped = drop_beyond(ids, 8, 8.0)
    assert torch.equal(kept, ids)
    assert not dropped.any()


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5])
def test_every_choice_is_kept_or_counted_as_dropped(factor):
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(65, 9, generator=generator).square().argsort(-1)[:, :3]
    valid = torch.rand(65, generator=generator) < 0.8
    kept, dropped = drop_beyond(ids, 9, factor, valid)
    asked = torch.bincount(ids[valid].flatten(), minlength=9)
    served = torch.bincount(kept.flatten(), minlength=10)[:9]
    assert torch.equal(served + dropped, asked)
    assert int(served.max()) <= capacity_of(factor, int(valid.sum()), 3, 9)
    assert torch.equal(kept[kept < 9], ids[kept < 9])


def test_no_tokens_drop_nothing():
    kept, dropped = drop_beyond(torch.empty(0, 2, dtype=torch.int64), 4, 1.0)
    assert kept.shape == (0, 2) and dropped.tolist() == [0, 0, 0, 0]


IDS, SCORES, BIAS = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(4)


@pytest.mark.parametrize(("run", "where"), [
    (lambda: drop_beyond(IDS[0], 4, 1.0), "capacity.ids"),
    (lambda: drop_beyond(IDS.to(torch.int32), 4, 1.0), "capacity.ids"),
    (lambda: drop_beyond(IDS, 4, 0.0), "capacity.factor"),
    (lambda: drop_beyond(IDS, 4, 1.0, torch.ones(3)), "capacity.valid"),
    (lambda: drop_beyond(IDS, 4, 1.0, torch.ones(4, dtype=torch.bool)), "capacity.valid"),
    (lambda: bias_histogram(SCORES[0], BIAS, 2), "balance.scores"),
    (lambda: bias_histogram(SCORES, BIAS[1:], 2), "balance.bias"),
    (lambda: bias_histogram(SCORES, BIAS, 4), "balance.top_k"),
    (lambda: bias_histogram(SCORES, BIAS, 2, torch.ones(3)), "balance.valid"),
    (lambda: balanced_bias(torch.zeros(3, 10, dtype=torch.int64), BIAS, 2), "balance.bias"),
])
def test_wrong_arguments_are_named(run, where):
    with pytest.raises(OperatorError) as caught:
        run()
    assert caught.value.where == where


def test_the_capacity_is_rounded_up():
    assert capacity_of(1.25, 10, 2, 8) == 4


@pytest.mark.parametrize("active", [1, 4])
def test_the_new_bias_spreads_a_lopsided_batch(active):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 32, generator=generator, dtype=torch.float64)
    logits += torch.linspace(-2, 2, 32, dtype=torch.float64)  # later experts are preferred
    scores, rule = torch.sigmoid(logits), RouterRule(active, 1, 1, True, 1.0)
    bias = torch.zeros(32, dtype=torch.float64)

    def unevenness() -> float:
        counts = torch.bincount(select_experts(scores, bias, rule).flatten(), minlength=32)
        return float(counts.max() * 32 / counts.sum())

    assert unevenness() > 2.5
    for _ in range(8):
        parts = [bias_histogram(part, bias, active) for part in scores.chunk(3)]
        bias = balanced_bias(sum(parts), bias, active)
    assert abs(float(bias.mean())) < 1e-12
    assert unevenness() < 1.15


def test_one_step_is_the_quantile_of_the_needed_bias():
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(2000, 8, generator=generator, dtype=torch.float64)
    bias = torch.linspace(-0.2, 0.2, 8, dtype=torch.float64)
    alpha = (scores + bias).sort(-1, descending=True).values[:, 2:3]
    exact = (alpha - scores).quantile(2 / 8, dim=0)
    found = balanced_bias(bias_histogram(scores, bias, 2), bias, 2)
    bin_width = (float(bias.max() - bias.min()) + 2) / 1000
    assert float((found - (exact - exact.mean())).abs().max()) < 2 * bin_width


def test_padding_counts_for_nothing_and_no_tokens_change_nothing():
    scores = torch.rand(6, 4)
    valid = torch.tensor([True, True, False, True, False, True])
    bias = torch.tensor([0.1, -0.1, 0.0, 0.0])
    assert torch.equal(bias_histogram(scores, bias, 2, valid), bias_histogram(scores[valid], bias, 2))
    nothing = bias_histogram(scores, bias, 2, torch.zeros(6, dtype=torch.bool))
    assert torch.equal(balanced_bias(nothing, bias, 2), bias)
