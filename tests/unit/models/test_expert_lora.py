"""Adapters on routed experts as parts of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.compare import relative_error
from tests.unit.checkpoint.tiny import k3_config
from trimtab.arch.adapter import LoRATarget, resolve_targets, target_table
from trimtab.arch.load import load_arch
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.errors import AdapterError
from trimtab.models.context import DropoutKey, ForwardContext, Routing
from trimtab.models.decoder import CausalLM
from trimtab.models.expert_lora import ExpertAdapter, expert_delta
from trimtab.models.lora import disabled, inject, lora_modules, lora_parameters, merge
from trimtab.models.tape import ChoiceTape
from trimtab.verify.tolerances import limit

LAYOUTS = ("per_expert", "shared_outer")
IDS = torch.randint(4, 96, (24,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "model"
    config = k3_config()
    init_checkpoint(load_arch(config, "tiny"), config, path, seed=1)
    return path


def load(base: Path, dtype: str = "fp32", compute: torch.dtype = torch.float32) -> CausalLM:
    return load_model(base, base_dtype=dtype, compute_dtype=compute, vision=False)[0]  # type: ignore[arg-type]


def targets_for(model: CausalLM, layout: str, dropout: float = 0.0) -> tuple[LoRATarget, ...]:
    return resolve_targets(
        model.arch, target_modules=["o_proj"], rank=4, alpha=8, dropout=dropout, experts=layout,  # type: ignore[arg-type]
    )


def adapted(
    base: Path, layout: str, dropout: float = 0.0, dtype: str = "fp32", *, trained: bool = True,
    split: bool = False,
) -> CausalLM:
    model = load(base, dtype)
    targets = targets_for(model, layout, dropout)
    if split:
        targets = tuple(
            replace(t, experts=replace(t.experts, split_a=True))
            if t.experts is not None and t.experts.parts == 2 else t
            for t in targets
        )
    inject(model, targets, seed=5)
    generator = torch.Generator().manual_seed(3)
    for name, p in lora_parameters(model).items():
        if trained and name.endswith(".B"):
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def logits(model: CausalLM, ids: Tensor = IDS, **fields: object) -> Tensor:
    return model.logits(model(ids, ForwardContext.packed([len(ids)], **fields)))  # type: ignore[arg-type]


def test_targets_name_the_experts_of_every_layer_and_the_table_shows_them(base):
    arch = load(base).arch
    targets = resolve_targets(arch, target_modules=["o_proj"], rank=4, alpha=8, experts="shared_outer")
    experts = [t for t in targets if t.experts is not None]
    moe_layers = [n for n, layer in enumerate(arch.layers) if hasattr(layer.ffn, "num_experts")]
    assert [t.fqn for t in experts] == [
        f"layers.{n}.mlp.experts.{leaf}" for n in moe_layers for leaf in ("gate_up", "down")
    ]
    gate_up, down = experts[:2]
    f = gate_up.out_features
    assert (gate_up.shape("A"), gate_up.shape("B")) == ((4, 32), (4, 2, f, 4))
    assert (down.shape("A"), down.shape("B")) == ((4, 4, f), (32, 4))
    assert gate_up.num_parameters == 4 * 32 + 4 * 2 * f * 4
    assert gate_up.branch == "routed_experts"
    table = target_table(arch, targets)
    row = next(r for r in table.rows if r.leaf == "experts.gate_up")
    assert (row.kind, row.count, row.available) == ("moe", len(moe_layers), len(moe_layers))
    assert any("4 in each" in note and "shared_outer" in note for note in table.notes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_b_and_a_disabled_adapter_are_the_base_bit_for_bit(base, layout):
    before = logits(load(base))
    assert torch.equal(logits(adapted(base, layout, trained=False)), before)
    model = adapted(base, layout)
    assert not torch.equal(logits(model), before)
    with disabled(model):
        assert torch.equal(logits(model), before)


def test_the_start_of_an_expert_depends_on_seed_name_and_number_only(base):
    model = load(base)
    target = next(t for t in targets_for(model, "per_expert") if t.experts is not None)
    whole = ExpertAdapter(target, seed=5)
    fewer = ExpertAdapter(replace(target, experts=replace(target.experts, num_experts=2)), seed=5)
    assert torch.equal(whole.A[:2], fewer.A)
    assert not torch.equal(whole.A[0], whole.A[1])
    assert not torch.equal(whole.A, ExpertAdapter(target, seed=6).A)
    assert not whole.B.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_tokens_reached_get_a_gradient_and_others_none(base, layout):
    model = adapted(base, layout)
    reached: dict[int, Tensor] = {}

    def count(routing: Routing) -> None:
        reached[routing.layer] = routing.tokens_per_expert

    hidden = model(IDS, ForwardContext.packed([len(IDS)], stats=count))
    model.token_losses(hidden[:-1], IDS[1:]).sum().backward()
    for name, module in lora_modules(model).items():
        if not isinstance(module, ExpertAdapter):
            continue
        counts = reached[int(name.split(".")[1])]
        for side, p in (("A", module.A), ("B", module.B)):
            assert p.grad is not None
            if module.axes.shares(side):
                assert p.grad.any(), name
            else:
                assert p.grad.flatten(1).any(1).tolist() == (counts > 0).tolist(), name
    assert all(p.grad is None for n, p in model.named_parameters() if ".lora." not in n)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_with_dropout_gives_the_same_bits(base, layout):
    model, results = adapted(base, layout, dropout=0.3), []
    for recompute in ("none", "layer", "selective"):
        model.zero_grad(set_to_none=True)
        ctx = ForwardContext.packed(
            [len(IDS)], recompute=recompute, tape=ChoiceTape(), token_ids=torch.arange(len(IDS)),
            dropout=DropoutKey(1, 2),
        )
        loss = model.token_losses(model(IDS, ctx)[:-1], IDS[1:]).sum()
        loss.backward()
        results.append([loss, *(p.grad for p in lora_parameters(model).values())])
    for kept, *again in zip(*results, strict=True):
        assert all(torch.equal(kept, each) for each in again)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_follows_token_and_step(base, layout):
    model, numbers = adapted(base, layout, dropout=0.3), torch.arange(len(IDS))
    one = logits(model, token_ids=numbers, dropout=DropoutKey(1, 2))
    assert torch.equal(one, logits(model, token_ids=numbers, dropout=DropoutKey(1, 2)))
    assert not torch.equal(one, logits(model, token_ids=numbers + 1, dropout=DropoutKey(1, 2)))
    assert not torch.equal(one, logits(model, token_ids=numbers, dropout=DropoutKey(1, 3)))
    assert not torch.equal(one, logits(model))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_weights_give_the_logits_of_the_adapter(base, layout, split):
    model = adapted(base, layout, split=split)
    tape = ChoiceTape()
    before = logits(model, tape=tape)
    merge(model)
    assert not lora_parameters(model)
    found = logits(model, tape=ChoiceTape("force", tape.choices))
    assert relative_error(found, before) <= limit("merge.float32")


def test_sharing_means_the_same_matrix_for_every_expert(base):
    shared, single = adapted(base, "shared_outer"), adapted(base, "per_expert")
    for name, module in lora_modules(single).items():
        given = lora_modules(shared)[name]
        for side in ("A", "B"):
            target, source = getattr(module, side), getattr(given, side)
            target.data.copy_(source.data.expand_as(target))
    assert relative_error(logits(shared), logits(single)) <= limit("self.float32")


def test_an_experts_delta_is_its_b_times_its_a(base):
    model = adapted(base, "per_expert", split=True)
    name, module = next((n, m) for n, m in lora_modules(model).items() if n.endswith("gate_up"))
    delta = expert_delta(module.axes, module.A, module.B, module.scaling, 2)
    up = module.scaling * module.B[2, 1] @ module.A[2, 1]
    assert torch.allclose(delta[1], up, atol=1e-7), name


def test_packed_experts_take_an_adapter_and_refuse_to_merge_it(base):
    model = adapted(base, "per_expert", dtype="native")
    assert not torch.equal(logits(model), logits(load(base, "native")))
    with pytest.raises(AdapterError, match=r"TT503.*experts\.gate_up"):
        merge(model)


def test_experts_of_other_sizes_are_refused(base):
    model = load(base)
    target = next(t for t in targets_for(model, "per_expert") if t.experts is not None)
    wrong = replace(target, experts=replace(target.experts, num_experts=5))
    with pytest.raises(AdapterError, match="TT502"):
        inject(model, [wrong], seed=0)
