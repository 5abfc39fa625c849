"""Blockwise attention and the indexer against their definitions."""

from __future__ import annotations

import pytest
import torch

from tests.oracles.naive_ops import causal_selection
from tests.support.compare import relative_error
from trimtab.ops.attention.blockwise import QUERY_BLOCK, blockwise_attention, pack_borders
from trimtab.ops.attention.indexer import index_scores, select_keys, select_mask
from trimtab.ops.attention.reference import attention_reference
from trimtab.verify.tolerances import limit

PACKS = ([1], [5, 1], [QUERY_BLOCK], [QUERY_BLOCK + 1, 3], [60, 100, 2])


def qkv(total: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((total, 2, 6), (total, 2, 6), (total, 2, 4))
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def borders_of(lengths: list[int]):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return pack_borders(tuple(lengths), torch.device("cpu")), cu


def run(op, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = op(*leaves)
    out.mul(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out, *(x.grad for x in leaves)]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("top_k", [None, 9])
def test_blockwise_attention_equals_the_reference(lengths, dtype, top_k):
    tensors = qkv(sum(lengths), dtype)
    borders, cu = borders_of(lengths)
    selected = None
    if top_k is not None:
        generator = torch.Generator().manual_seed(3)
        iq = torch.randn(sum(lengths), 8, 4, generator=generator)
        ik, w = torch.randn(sum(lengths), 4, generator=generator), torch.rand(sum(lengths), 8)
        selected = select_keys(iq, ik, w, top_k, borders)
    wide = [x.double() for x in tensors]
    expected = run(lambda q, k, v: attention_reference(q, k, v, 0.4, cu, selected), wide)
    found = run(lambda q, k, v: blockwise_attention(q, k, v, 0.4, borders, selected), tensors)
    kind = "attention." + str(dtype).removeprefix("torch.")
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= limit(kind)


def test_documents_of_a_pack_do_not_see_each_other():
    q, k, v = qkv(50, torch.float32)
    borders, _ = borders_of([20, 30])
    before = blockwise_attention(q, k, v, 0.4, borders)
    k[:20] += 1
    v[:20] += 1
    after = blockwise_attention(q, k, v, 0.4, borders)
    assert torch.equal(before[20:], after[20:])


@pytest.mark.parametrize("top_k", [1, 7, 64])
def test_selection_equals_an_independent_one_with_ties(top_k):
    generator = torch.Generator().manual_seed(5)
    # Small integers make many equal scores, and ReLU makes many exact zeros.
    q = torch.randint(-1, 2, (40, 8, 3), generator=generator).double()
    k = torch.randint(-1, 2, (40, 3), generator=generator).double()
    w = torch.randint(0, 2, (40, 8), generator=generator).double()
    borders, _ = borders_of([40])
    found = select_keys(q, k, w, top_k, borders)
    expected = causal_selection(index_scores(q, k, w), top_k)
    for t in range(40):
        chosen = sorted(i for i in found[t].tolist() if i >= 0)
        assert chosen == sorted(expected[t])


def test_equal_scores_keep_the_lowest_positions():
    visible = torch.ones(1, 6, dtype=torch.bool)
    scores = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.0]])
    assert select_mask(scores, visible, 3).tolist() == [[False, True, True, True, False, False]]


def test_selection_never_reaches_another_document():
    generator = torch.Generator().manual_seed(6)
    q, k = torch.randn(60, 8, 4, generator=generator), torch.randn(60, 4, generator=generator)
    borders, _ = borders_of([25, 35])
    found = select_keys(q, k, torch.rand(60, 8, generator=generator), 10, borders)
    for t in range(60):
        ids = found[t][found[t] >= 0]
        assert ids.min() >= (0 if t < 25 else 25)
        assert ids.max() <= t
        assert len(ids) == min(10, t + 1 if t < 25 else t - 24)
