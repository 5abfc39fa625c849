"""Attention over packs: every implementation against the equation, outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.compare import relative_error
from trimtab.errors import OperatorError
from trimtab.ops.attention import tile_mask
from trimtab.ops.attention.cost import gather_us, tile_us
from trimtab.ops.attention.operators import ATTENTION, INDEXER, LatentKeys
from trimtab.ops.attention.packs import QUERY_BLOCK, PackBorders, pack_borders
from trimtab.ops.attention.pooling import PoolRule
from trimtab.ops.attention.selection import Selection
from trimtab.ops.native.library import unavailable
from trimtab.verify.tolerances import limit

PACKS = ([1, 2], [63], [5, 0, 60], [100], [QUERY_BLOCK + 1, 3], [60, 200, 2])
HEADS, NOPE, SHARED, VALUE, RANK, SCALE = 3, 5, 2, 4, 6, 0.4
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    unavailable("attention") is not None, reason=f"native: {unavailable('attention')}"
)
FAST = ["tiles", "gather", pytest.param("native", marks=needs_compiler)]


@dataclass
class Case:
    """Leaves of one pack: queries, latent, shared key part, kv_b."""

    borders: PackBorders
    leaves: list[Tensor]

    def run(self, name: str, selection: Selection | None, dtype: torch.dtype) -> list[Tensor]:
        """Output and the gradient of each leaf."""
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in self.leaves]
        q, latent, shared, weight = leaves
        keys = LatentKeys(
            latent, shared, lambda: torch.einsum("tl,hkl->thk", latent, weight), lambda: weight, VALUE
        )
        out = ATTENTION.force(name)(q, keys, SCALE, self.borders, selection)
        out.mul(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        return [out, *(x.grad for x in leaves if x.grad is not None)]


def draw(lengths: list[int], seed: int = 0) -> Case:
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (total, HEADS, NOPE + SHARED), (total, RANK), (total, SHARED), (HEADS, NOPE + VALUE, RANK)
    )
    leaves = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return Case(pack_borders(tuple(lengths), CPU), leaves)


def some_keys(borders: PackBorders, share: float, *, empty_rows: bool = False) -> Selection:
    """A random share of the visible keys, no keys at all for every third query on request."""
    generator = torch.Generator().manual_seed(7)
    total = borders.total
    key = torch.arange(total)
    kept = (key <= key.unsqueeze(1)) & (key >= borders.starts.unsqueeze(1))
    kept &= torch.rand(total, total, generator=generator) < share
    kept |= torch.eye(total, dtype=torch.bool)
    if empty_rows:
        kept[::3] = False
    return Selection.from_positions(torch.where(kept, key, -1), borders)


@cache
def by_definition(lengths: tuple[int, ...], share: float | None, empty_rows: bool) -> list[Tensor]:
    """What the equation gives, in float64."""
    case = draw(list(lengths))
    selection = None if share is None else some_keys(case.borders, share, empty_rows=empty_rows)
    return case.run("reference", selection, torch.float64)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("share", [0.15, 1.0])
@pytest.mark.parametrize("empty_rows", [False, True])
def test_outputs_and_gradients_equal_the_reference(
    name: str, lengths: list[int], share: float, empty_rows: bool
) -> None:
    case = draw(lengths)
    selection = some_keys(case.borders, share, empty_rows=empty_rows)
    expected = by_definition(tuple(lengths), share, empty_rows)
    kinds = ("float32",) if name == "native" else ("float64", "float32")
    for kind in kinds:
        found = case.run(name, selection, getattr(torch, kind))
        assert len(found) == len(expected) == 5
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) <= limit(f"attention.{kind}")


@pytest.mark.parametrize("name", ["tiles", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_without_a_selection_every_visible_key_counts(name: str, lengths: list[int]) -> None:
    case = draw(lengths)
    expected = by_definition(tuple(lengths), None, False)
    kind = "float32" if name == "native" else "float64"
    for a, b in zip(case.run(name, None, getattr(torch, kind)), expected, strict=True):
        assert relative_error(a, b) <= limit(f"attention.{kind}")


def test_several_heads_share_a_buffer_or_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.ops.attention import tiles

    case = draw([QUERY_BLOCK + 70])
    together = case.run("tiles", None, torch.float64)
    monkeypatch.setattr(tiles, "BUFFER_ELEMENTS", 1)
    for a, b in zip(case.run("tiles", None, torch.float64), together, strict=True):
        assert relative_error(a, b) <= limit("attention.float64")


@pytest.mark.parametrize("name", FAST)
def test_documents_of_a_pack_do_not_see_each_other(name: str) -> None:
    case = draw([70, 90])
    for selection in (None, some_keys(case.borders, 0.3)):
        if selection is None and name == "gather":
            continue  # gathers selected keys only
        before = case.run(name, selection, torch.float32)
        changed = draw([70, 90])
        for leaf in changed.leaves[:3]:
            leaf[:70] += 1
        assert torch.equal(changed.run(name, selection, torch.float32)[0][70:], before[0][70:])


@pytest.mark.parametrize("name", FAST)
def test_no_result_depends_on_what_new_memory_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw([QUERY_BLOCK + 33, 20])
    selection = some_keys(case.borders, 0.2, empty_rows=True)
    clean = case.run(name, selection, torch.float32)

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*args: object, **kwargs: object) -> Tensor:
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-1)

        return filled

    for owner, attribute in (
        (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")
    ):
        monkeypatch.setattr(owner, attribute, poisoned(getattr(owner, attribute)))
    for a, b in zip(case.run(name, selection, torch.float32), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["tiles", pytest.param("native", marks=needs_compiler)])
def test_key_ranges_that_a_block_does_not_select_are_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_mask, "KEY_RUN", 16)
    case = draw([3 * QUERY_BLOCK])
    query = torch.arange(case.borders.total)
    # What lies next to the query, and something at the start of the sequence.
    positions = torch.stack((query, query - 1, torch.where(query >= 7, query % 7, -1)), 1)
    selection = Selection.from_positions(positions, case.borders)
    last, keys = slice(2 * QUERY_BLOCK, 3 * QUERY_BLOCK), slice(0, 3 * QUERY_BLOCK)
    runs, _ = tile_mask.block_mask(
        case.borders, selection, last, keys, torch.float32, name == "native"
    )
    assert runs.runs == (slice(0, 16), slice(2 * QUERY_BLOCK - 16, 3 * QUERY_BLOCK))
    expected = case.run("reference", selection, torch.float64)
    for a, b in zip(case.run(name, selection, torch.float32), expected, strict=True):
        assert relative_error(a, b) <= limit("attention.float32")


@pytest.mark.parametrize("name", FAST)
def test_both_forms_of_a_selection_give_the_same(name: str) -> None:
    case = draw([200])
    kept = some_keys(case.borders, 0.1)
    positions = kept.all_positions()
    listed = Selection(case.borders, kept.width, None, positions)
    assert kept.bits is not None and listed.bits is None
    for a, b in zip(
        case.run(name, kept, torch.float32), case.run(name, listed, torch.float32), strict=True
    ):
        assert torch.equal(a, b)


def test_long_packs_with_few_heads_take_tiles_and_many_heads_gather() -> None:
    # K3.1-like widths: 128 + 64 channels, values of 128, latents of 512.
    assert tile_us(8192, 8, 192, 128) < gather_us(2048, 8, 192, 128, 512, 64)
    assert tile_us(16384, 64, 192, 128) > gather_us(2048, 64, 192, 128, 512, 64)
    case = draw([100])
    q, latent, shared, weight = case.leaves
    keys = LatentKeys(latent, shared, lambda: latent, lambda: weight, VALUE)
    chosen = ATTENTION.choose(ATTENTION.case(q, keys, SCALE, case.borders, some_keys(case.borders, 0.2)))
    assert chosen.name == "tiles"
    dropped = LatentKeys(latent, shared, lambda: latent, None, VALUE)
    shape = ATTENTION.case(q, dropped, SCALE, case.borders, some_keys(case.borders, 0.2))
    reasons = {choice.name: choice.reason for choice in ATTENTION.explain(shape)}
    assert "dropout" in str(reasons["gather"])


def test_the_flops_of_both_passes_are_counted() -> None:
    case = draw([QUERY_BLOCK])
    pairs = QUERY_BLOCK * QUERY_BLOCK * HEADS
    with FlopCounterMode(display=False) as counter:
        case.run("tiles", None, torch.float64)
    counted = {str(k): v for k, v in counter.get_flop_counts()["Global"].items()}
    assert counted["trimtab.attention_tiles_fwd"] == 2 * pairs * (NOPE + SHARED + VALUE)
    assert counted["trimtab.attention_tiles_bwd"] == 2 * pairs * (3 * (NOPE + SHARED) + 2 * VALUE)


@pytest.mark.parametrize("name", ["tiles", "gather"])
def test_shapes_are_known_without_values(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    length = QUERY_BLOCK + 5
    with FakeTensorMode():
        case = draw([length])
        index = [torch.randn(length, *sizes) for sizes in ((2, 3), (3,), (2,))]
        selection = INDEXER(*index, PoolRule(1, 9, tail=False), case.borders)
        found = case.run(name, selection, torch.float32)
    assert selection.bits is not None and selection.bits.shape == (case.borders.byte_starts[-1],)
    assert [tuple(x.shape) for x in found] == [
        (length, HEADS, VALUE), *(tuple(x.shape) for x in case.leaves)
    ]


@pytest.mark.parametrize("name", FAST)
def test_bfloat16_is_rounded_at_the_ends_only(name: str) -> None:
    case = draw([150])
    selection = some_keys(case.borders, 0.3)
    found = case.run(name, selection, torch.bfloat16)
    assert all(x.dtype is torch.bfloat16 for x in found)
    rounded = Case(case.borders, [x.bfloat16().double() for x in case.leaves])
    expected = rounded.run("reference", selection, torch.float64)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= limit("attention.bfloat16")


BROKEN: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "queries": (lambda a: a.update(q=a["q"][1:]), "attention.q"),
    "latent": (lambda a: a.update(latent=a["latent"].long()), "attention.latent"),
    "shared": (lambda a: a.update(shared=torch.zeros(50, 9)), "attention.shared"),
    "scale": (lambda a: a.update(scale=0.0), "attention.scale"),
    "selection": (
        lambda a: a.update(selection=some_keys(pack_borders((20, 30), CPU), 1.0)), "attention.selection"
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_arguments_are_named(name: str) -> None:
    case = draw([50])
    arguments: dict[str, object] = {
        "q": case.leaves[0], "latent": case.leaves[1], "shared": case.leaves[2], "scale": SCALE,
        "selection": None,
    }
    change, where = BROKEN[name]
    change(arguments)
    keys = LatentKeys(arguments["latent"], arguments["shared"], lambda: None, None, VALUE)
    with pytest.raises(OperatorError) as caught:
        ATTENTION(arguments["q"], keys, arguments["scale"], case.borders, arguments["selection"])
    assert caught.value.where == where


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["queries", "latents", "shared part"])
def test_nan_reaches_the_output_and_the_gradients(name: str, leaf: int) -> None:
    case = draw([QUERY_BLOCK + 10])
    case.leaves[leaf][3] = float("nan")
    selection = some_keys(case.borders, 1.0)
    out, *gradients = case.run(name, selection, torch.float32)
    assert bool(out[3].isnan().all())
    assert all(bool(g.isnan().any()) for g in gradients)


def test_an_empty_pack_gives_nothing() -> None:
    case = draw([0])
    for name in ("tiles", "gather"):
        selection = Selection.from_positions(torch.zeros(0, 2, dtype=torch.int32), case.borders)
        assert case.run(name, selection, torch.float32)[0].shape == (0, HEADS, VALUE)
