"""Layers without an indexer of their own attend to what the layer before them selected."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import relative_error
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.mla import MLA
from trimtab.models.tape import ChoiceTape
from trimtab.ops.attention.packs import pack_borders
from trimtab.ops.attention.selection import Selection

EXACT = 1e-12
TOP_K = 8


def config() -> dict[str, Any]:
    """Indexers in layers 0 and 3 of five."""
    found: dict[str, Any] = copy.deepcopy(preset_config("glm-5-tiny"))
    found.update(
        num_hidden_layers=5, hidden_size=32, intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, vocab_size=64, index_topk=TOP_K, index_topk_freq=None,
        indexer_types=["full", "shared", "shared", "full", "shared"],
        mlp_layer_types=["dense"] + ["sparse"] * 4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tmp_path_factory.mktemp("shared") / "model"
    init_checkpoint(load_arch(config(), "test"), config(), folder, seed=2)
    return load_model(folder, base_dtype="fp64")[0]


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: CausalLM, tokens: Tensor, **fields: Any) -> Tensor:
    ctx = ForwardContext.packed([len(tokens)], **fields)
    return model.logits(model(tokens, ctx))


def selections_by_layer(model: CausalLM, tokens: Tensor, patch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    true = MLA.forward

    def watch(self: MLA, x: Tensor, selected: Any, ctx: ForwardContext) -> tuple[Tensor, Any]:
        y, out = true(self, x, selected, ctx)
        seen.append(out)
        return y, out

    patch.setattr(MLA, "forward", watch)
    logits(model, tokens)
    return seen


def test_a_shared_layer_uses_the_selection_before_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = selections_by_layer(model, ids(40), monkeypatch)
    assert seen[0] is seen[1] is seen[2] and seen[3] is seen[4]
    kept, other = seen[0].all_positions(), seen[3].all_positions()
    assert not torch.equal(kept, other)
    assert ((kept >= 0).sum(1) == (torch.arange(40) + 1).clamp(max=TOP_K)).all()


def test_up_to_top_k_tokens_every_layer_is_dense(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selections_by_layer(model, ids(TOP_K), monkeypatch) == [None] * 5


def test_the_tape_holds_one_selection_per_indexer(model: CausalLM) -> None:
    tape = ChoiceTape()
    free = logits(model, ids(40), tape=tape)
    assert {layer for layer, kind in tape.choices if kind == "selection"} == {0, 3}
    forced = dict(tape.choices)
    own = torch.arange(40).unsqueeze(1)  # every token sees itself only
    forced[0, "selection"] = Selection.from_positions(own, pack_borders((40,), own.device))
    changed = logits(model, ids(40), tape=ChoiceTape("force", forced))
    replayed = logits(model, ids(40), tape=ChoiceTape("force", tape.choices))
    assert torch.equal(replayed, free) and not torch.allclose(changed, free, atol=1e-3)


def test_recomputation_gives_the_same_gradients(model: CausalLM) -> None:
    found = []
    for recompute in ("none", "layer", "selective"):
        model.requires_grad_(True)
        model.zero_grad(set_to_none=True)
        ctx = ForwardContext.packed([40], recompute=recompute, tape=ChoiceTape())
        model(ids(40), ctx).square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.requires_grad_(False)
    kept, *others = found
    for again in others:
        assert kept.keys() == again.keys()
        assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert not any("indexer" in name for name in found[0])


@pytest.mark.parametrize("pieces", [[30, 1, 1, 8], [5, 1, 20, 14], [1] * 40])
def test_decoding_equals_the_full_pass(model: CausalLM, pieces: list[int]) -> None:
    tokens, cache = ids(40), model.new_cache(1)
    out = [logits(model, piece, cache=cache) for piece in tokens.split(pieces)]
    assert relative_error(torch.cat(out), logits(model, tokens)) < EXACT


@torch.no_grad()
def test_sequences_of_a_pack_do_not_see_each_other(model: CausalLM) -> None:
    a, b = ids(23, 1), ids(31, 2)
    ctx = ForwardContext.packed([23, 31])
    both = model.logits(model(torch.cat((a, b)), ctx))
    assert relative_error(both, torch.cat((logits(model, a), logits(model, b)))) < EXACT


@torch.no_grad()
def test_sequences_of_different_age_decode_together(model: CausalLM) -> None:
    a, b = ids(12, 3), ids(33, 4)
    cache = model.new_cache(2)
    first = ForwardContext.packed([11, 32], cache=cache)
    model(torch.cat((a[:11], b[:32])), first)
    last = model.logits(model(torch.stack((a[11], b[32])), ForwardContext.packed([1, 1], cache=cache)))
    expected = torch.stack((logits(model, a)[-1], logits(model, b)[-1]))
    assert relative_error(last, expected) < EXACT
