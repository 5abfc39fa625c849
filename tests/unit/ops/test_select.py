"""The choice of keys: exact, ties by position, whichever implementation and form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.oracles.naive_ops import causal_selection
from tests.support.selection import DIM, HEADS, draw, naive_pools
from trimtab.errors import OperatorError
from trimtab.ops.attention.indexer import index_scores, select_mask
from trimtab.ops.attention.operators import INDEXER
from trimtab.ops.attention.packs import QUERY_BLOCK, pack_borders
from trimtab.ops.attention.pooling import PoolRule, pool_keys, pool_starts
from trimtab.ops.attention.selection import Selection, kept_as_bits, pack_bits, unpack_bits
from trimtab.ops.native.library import unavailable

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    unavailable("attention") is not None, reason=f"native: {unavailable('attention')}"
)
EACH = ["reference", "blocks", pytest.param("native", marks=needs_compiler)]


def tokens(top_k: int) -> PoolRule:
    return PoolRule(1, top_k, tail=False)


def choose(name: str, q: Tensor, k: Tensor, w: Tensor, rule: PoolRule, *lengths: int) -> Selection:
    """The selection; what runs in float32 only gets numbers that are exact there."""
    dtype = torch.float32 if name == "native" else q.dtype
    return INDEXER.force(name)(
        q.to(dtype), k.to(dtype), w.to(dtype), rule, pack_borders(lengths, CPU)
    )


def rows(found: Selection) -> list[list[int]]:
    return [[i for i in row if i >= 0] for row in found.all_positions().tolist()]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("top_k", [1, 7, 64, 200])
def test_tokens_are_chosen_exactly_with_many_ties(name: str, top_k: int) -> None:
    generator = torch.Generator().manual_seed(5)
    length = QUERY_BLOCK + 12
    # Small integers make many equal scores, and ReLU makes many exact zeros.
    q = torch.randint(-1, 2, (length, 8, 3), generator=generator).double()
    k = torch.randint(-1, 2, (length, 3), generator=generator).double()
    w = torch.randint(-1, 2, (length, 8), generator=generator).double()
    expected = causal_selection(index_scores(q, k, w), top_k)
    found = rows(choose(name, q, k, w, tokens(top_k), length))
    assert found == [sorted(row) for row in expected]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_of_all_equal_scores_the_lowest_positions_win(name: str, value: float) -> None:
    q, k, w = torch.ones(90, 2, 3), torch.ones(90, 3), torch.full((90, 2), value)
    found = rows(choose(name, q, k, w, tokens(9), 30, 60))
    begins = [0] * 30 + [30] * 60
    assert found == [list(range(b, min(b + 9, t + 1))) for t, b in enumerate(begins)]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(("size", "count"), [(4, 3), (2, 5), (1, 6), (3, 2)])
@pytest.mark.parametrize("lengths", [(40,), (5, 1, 0, 23, 2), (QUERY_BLOCK - 3, 10)], ids=str)
def test_packs_select_what_each_document_selects(
    name: str, lengths: tuple[int, ...], size: int, count: int, tail: bool
) -> None:
    rule, total = PoolRule(size, count, tail), sum(lengths)
    q, k, w = draw(total, HEADS, DIM), draw(total, DIM, seed=1), draw(total, HEADS, seed=2)
    gates, bias = draw(total, DIM, seed=3), draw(size, DIM, seed=4)
    members = torch.tensor(pool_starts(lengths, size)).unsqueeze(1) + torch.arange(size)
    pooled = pool_keys(k[members], gates[members], bias)
    found = rows(choose(name, q, pooled, w, rule, *lengths))
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        want = naive_pools(q[part], k[part], w[part], gates[part], bias, rule)
        assert [[p - begin for p in row] for row in found[part]] == want
        begin += length


def test_equal_scores_keep_the_lowest_positions() -> None:
    visible = torch.ones(2, 6, dtype=torch.bool)
    scores = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert select_mask(scores, visible, 3).int().tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("name", ["blocks", pytest.param("native", marks=needs_compiler)])
def test_keys_whose_score_is_nan_are_kept(name: str) -> None:
    q, k, w = torch.ones(60, 2, 3), torch.ones(60, 3), torch.ones(60, 2)
    k[40] = float("nan")
    found = rows(choose(name, q, k, w, tokens(4), 60))
    assert all(row == [0, 1, 2, 40] for row in found[40:])


@needs_compiler
def test_native_scores_of_any_magnitude_and_sign_are_ordered() -> None:
    from trimtab.ops.attention import native

    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, 333, generator=generator) * 10.0 ** torch.randint(
        -38, 38, (50, 333), generator=generator
    )
    scores[:, ::7] = 0.0
    scores[:, ::11] = -0.0
    scores[:, ::13] = -math.inf
    visible = torch.ones(scores.shape, dtype=torch.bool)
    first, last = torch.zeros(50, dtype=torch.int32), torch.full((50,), 333, dtype=torch.int32)
    for top_k in (1, 100, 170, 332, 333):
        found = unpack_bits(native.select_rows(scores, first, last, top_k), 333)
        assert torch.equal(found, select_mask(scores, visible, top_k))


@pytest.mark.parametrize("width", [1, 7, 8, 9, 300])
def test_bits_hold_a_mask(width: int) -> None:
    mask = torch.rand(5, width, generator=torch.Generator().manual_seed(width)) < 0.5
    assert torch.equal(unpack_bits(pack_bits(mask), width), mask)


def test_the_smaller_form_is_kept() -> None:
    long, short = pack_borders((5000,), CPU), pack_borders((50, 40), CPU)
    # Half of 5000 x 5000 pairs in bits are 1.6 MB; 4 bytes for each of 20 keys 0.4 MB.
    assert not kept_as_bits(long, 20) and kept_as_bits(long, 2048)
    assert kept_as_bits(short, 20)
    positions = torch.arange(90).unsqueeze(1) - torch.arange(3)
    for borders, kept in ((short, 3), (pack_borders((2000,), CPU), 1)):
        chosen = torch.arange(borders.total).unsqueeze(1) if kept == 1 else positions
        chosen = torch.where(chosen < borders.starts.unsqueeze(1), -1, chosen)
        selection = Selection.from_positions(chosen, borders)
        assert (selection.bits is None) == (kept == 1)
        assert torch.equal(selection.all_positions().sort(1).values, chosen.sort(1).values.int())
        assert selection.nbytes <= 4 * borders.total * kept


@pytest.mark.parametrize(
    "hidden", [25, 19], ids=["a token to come", "another document"],
)
def test_a_list_with_hidden_keys_is_refused(hidden: int) -> None:
    borders = pack_borders((20, 20), CPU)
    positions = torch.full((40, 2), -1)
    positions[24] = torch.tensor([20, hidden])
    with pytest.raises(OperatorError, match="20 to 24") as caught:
        Selection.from_positions(positions, borders)
    assert (caught.value.where, caught.value.value) == ("positions[24, 1]", hidden)
    with pytest.raises(OperatorError, match="int32 or int64"):
        Selection.from_positions(positions.float(), borders)
    with pytest.raises(OperatorError, match=r"\[T=40, S\]"):
        Selection.from_positions(positions[1:], borders)


def test_wrong_arguments_are_named() -> None:
    q, k, w, borders = torch.ones(9, 2, 3), torch.ones(9, 3), torch.ones(9, 2), pack_borders((9,), CPU)
    for arguments, where in (
        ((q, k, w, PoolRule(1, 0, False), borders), "indexer.rule.count"),
        ((q, k[1:], w, tokens(2), borders), "indexer.pooled"),
        ((q, k, w, PoolRule(2, 1, True), borders), "indexer.pooled"),
        ((q, k, w[:, :1], tokens(2), borders), "indexer.weights"),
        ((q, k.double(), w, tokens(2), borders), "indexer.pooled"),
        ((q[1:], k, w, tokens(2), borders), "indexer.q"),
    ):
        with pytest.raises(OperatorError) as caught:
            INDEXER(*arguments)
        assert caught.value.where == where
