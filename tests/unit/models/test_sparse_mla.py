"""Latent attention layers: every implementation of the operator, adapters on kv_b, long prompts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import relative_error
from trimtab.arch.adapter import LoRATarget
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.models import indexer, mla
from trimtab.models.context import DropoutKey, ForwardContext, Recompute
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import inject, lora_parameters
from trimtab.models.tape import ChoiceTape
from trimtab.ops.backends import build_ops
from trimtab.verify.tolerances import limit

LENGTH, TOP_K = 50, 8
LIMIT = limit("self.float64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Two layers, the second of which takes over the selection of the first."""
    config: dict[str, Any] = copy.deepcopy(preset_config("glm-5-tiny"))
    config.update(
        num_hidden_layers=2, hidden_size=32, intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, vocab_size=64, index_topk=TOP_K, index_topk_freq=None,
        indexer_types=["full", "shared"], mlp_layer_types=["dense"] * 2, first_k_dense_replace=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    folder: Path = tmp_path_factory.mktemp("sparse") / "model"
    init_checkpoint(load_arch(config, "test"), config, folder, seed=5)
    return load_model(folder, base_dtype="fp64", compute_dtype=torch.float64)[0]


def adapted(model: CausalLM, dropout: float = 0.0) -> CausalLM:
    """A copy with LoRA on kv_b and q_b of both layers, B not zero."""
    model = copy.deepcopy(model)
    targets = []
    for layer in range(2):
        for name in ("kv_b_proj", "q_b_proj"):
            fqn = f"layers.{layer}.self_attn.{name}"
            weight = model.get_submodule(fqn).weight
            targets.append(LoRATarget(fqn, weight.shape[1], weight.shape[0], 4, 8.0, dropout, "mla", layer))
    inject(model, targets, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in lora_parameters(model).items():
        parameter.data = parameter.data.double()
        if name.endswith("B"):
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def with_ops(model: CausalLM, **ops: str) -> CausalLM:
    for module in model.modules():
        if isinstance(module, mla.MLA | indexer.Indexer):
            module.ops = build_ops(ops)
    return model


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(0))


def run(model: CausalLM, **fields: Any) -> list[Tensor]:
    """Hidden states and the gradients of all adapters."""
    ctx = ForwardContext.packed([LENGTH - 15, 15], token_ids=torch.arange(LENGTH), **fields)
    hidden = model(ids(), ctx)
    hidden.square().sum().backward()
    return [hidden, *(p.grad for p in lora_parameters(model).values() if p.grad is not None)]


@pytest.mark.parametrize("recompute", ["none", "layer", "selective"])
@pytest.mark.parametrize("name", ["gather", "tiles"])
def test_adapters_on_kv_b_get_the_same_gradients(model: CausalLM, name: str, recompute: Recompute) -> None:
    expected = run(with_ops(adapted(model), attention="reference", indexer="reference"))
    found = run(
        with_ops(adapted(model), attention=name, indexer="blocks"),
        recompute=recompute, tape=None if recompute == "none" else ChoiceTape(),
    )
    assert len(found) == len(expected) == 9
    assert all(bool(g.any()) for g in found)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= LIMIT


def test_dropout_on_kv_b_is_applied_to_the_keys(model: CausalLM) -> None:
    dropout = DropoutKey(seed=3, step=1)
    expected = run(with_ops(adapted(model, 0.5), attention="reference"), dropout=dropout)
    found = run(adapted(model, 0.5), dropout=dropout)
    kept = run(adapted(model, 0.5))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) <= LIMIT
    assert relative_error(kept[0], expected[0]) > 1e-3


@pytest.mark.parametrize("pieces", [[LENGTH], [20, 30], [1, 19, 29, 1]])
@torch.no_grad()
def test_prompts_in_pieces_equal_the_full_pass(
    model: CausalLM, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (mla, indexer):
        monkeypatch.setattr(module, "QUERIES", 7)
    full = model(ids(), ForwardContext.packed([LENGTH]))
    cache = model.new_cache(1)
    parts = [
        model(piece, ForwardContext.packed([len(piece)], cache=cache)) for piece in ids().split(pieces)
    ]
    assert relative_error(torch.cat(parts), full) <= LIMIT


@torch.no_grad()
def test_a_prompt_and_its_continuation_agree_after_sequences_are_dropped(model: CausalLM) -> None:
    cache = model.new_cache(2)
    first, second = ids()[:30], ids(43)[20:]
    model(torch.cat((first, second)), ForwardContext.packed([30, 23], cache=cache))
    cache.keep(torch.tensor([1]))
    last = model(torch.tensor([5]), ForwardContext.packed([1], cache=cache))
    full = model(torch.cat((second, torch.tensor([5]))), ForwardContext.packed([24]))
    assert relative_error(last, full[-1:]) <= LIMIT
