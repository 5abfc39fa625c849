"""Modules: inventory, LoRA, tape, caches, recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.oracles import random_k3
from tests.oracles.random_tensors import random_ids
from tests.support.compare import relative_error
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.params import inventory
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.errors import AdapterError, ConfigError
from trimtab.models.build import build_model
from trimtab.models.context import DropoutKey, ForwardContext, Routing
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate, stream
from trimtab.models.lora import disabled, inject, lora_parameters, merge
from trimtab.models.tape import ChoiceTape
from trimtab.ops.dropout import keep_mask

TEXT = ("vision", "projector")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = random_k3.tiny_config(True)
    path = tmp_path_factory.mktemp("k3") / "model"
    init_checkpoint(load_arch(config, "tiny"), config, path, seed=1)
    return path, random_ids(config, 60, seed=1)


@pytest.fixture
def model(checkpoint) -> CausalLM:
    return load_model(checkpoint[0], base_dtype="bf16")[0]


@pytest.fixture
def ids(checkpoint) -> Tensor:
    return torch.tensor(checkpoint[1])


def adapt(model: CausalLM, arch: ArchSpec, dropout: float = 0.0) -> None:
    targets = resolve_targets(
        arch, target_modules=["attention", "dense_ffn", "shared_experts"], rank=4, alpha=8,
        dropout=dropout,
    )
    inject(model, targets, seed=5)


def randomise_b(model: CausalLM) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, p in lora_parameters(model).items():
        if name.endswith(".B"):
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)


def logits(model: CausalLM, ids: Tensor, **fields) -> Tensor:
    return model.logits(model(ids, ForwardContext.packed([len(ids)], **fields)))


@pytest.mark.parametrize("preset", [
    "k3-tiny", "k3.1-tiny", "kimi-linear-tiny", "kimi-k3", "glm5-next-tiny", "glm-5.3-flash",
])
def test_models_have_exactly_the_parameters_of_the_inventory(preset):
    arch = load_arch(preset_config(preset), preset)
    model = build_model(arch, base_dtype="fp32")
    built = {n.removesuffix(".weight") if ".experts." in n else n: tuple(p.shape)
             for n, p in model.named_parameters()}
    expected = {p.name: p.shape for p in inventory(arch) if p.owner not in TEXT}
    assert {n: s for n, s in built.items() if not n.startswith(("vision.", "projector."))} == expected
    assert not any(p.requires_grad for p in model.parameters())


def test_stored_float32_tensors_stay_float32_beside_a_bf16_base(model):
    islands = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    for name, p in model.named_parameters():
        expected = torch.float32 if name.endswith(islands) else torch.bfloat16
        assert p.dtype is expected, name


def test_a_native_base_computes_what_the_decoded_base_computes(checkpoint, ids):
    native = load_model(checkpoint[0], base_dtype="native")[0]
    decoded = load_model(checkpoint[0], base_dtype="bf16")[0]
    assert torch.equal(logits(native, ids), logits(decoded, ids))


def test_an_adapter_with_zero_b_reproduces_the_base_bit_for_bit(model, ids):
    before = logits(model, ids)
    adapt(model, model.arch)
    assert torch.equal(logits(model, ids), before)


def test_disabling_a_trained_adapter_gives_the_base(model, ids):
    before = logits(model, ids)
    adapt(model, model.arch)
    randomise_b(model)
    assert not torch.equal(logits(model, ids), before)
    with disabled(model):
        assert torch.equal(logits(model, ids), before)


def test_merging_equals_the_adapter(checkpoint, ids):
    model = load_model(checkpoint[0], base_dtype="fp32", compute_dtype=torch.float32)[0]
    adapt(model, model.arch)
    randomise_b(model)
    with_adapter = logits(model, ids)
    merge(model)
    assert not lora_parameters(model)
    assert relative_error(logits(model, ids), with_adapter) <= 1e-5


def test_every_adapted_tensor_gets_a_gradient(model, ids):
    adapt(model, model.arch)
    randomise_b(model)
    hidden = model(ids, ForwardContext.packed([len(ids)]))
    model.token_losses(hidden[:-1], ids[1:]).sum().backward()
    for name, p in lora_parameters(model).items():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
    assert all(p.grad is None for n, p in model.named_parameters() if ".lora." not in n)


def test_the_initial_adapter_depends_on_seed_and_name_only(checkpoint):
    one, two = (load_model(checkpoint[0])[0] for _ in range(2))
    adapt(one, one.arch)
    targets = resolve_targets(one.arch, target_modules=["o_proj"], rank=4, alpha=8, dropout=0.0)
    inject(two, targets, seed=5)
    for name, p in lora_parameters(two).items():
        assert torch.equal(p, lora_parameters(one)[name])


def test_injecting_where_sizes_differ_is_refused(model):
    targets = resolve_targets(model.arch, target_modules=["o_proj"], rank=4, alpha=8, dropout=0.0)
    wrong = replace(targets[0], in_features=targets[0].in_features + 1)
    with pytest.raises(AdapterError, match=targets[0].fqn):
        inject(model, [wrong], seed=0)


def test_dropout_masks_have_the_rate_and_no_structure():
    ids = torch.arange(4000)
    mask = keep_mask(ids, 64, key=12345, rate=0.25).float()
    assert mask.mean().item() == pytest.approx(0.75, abs=0.005)
    assert (mask.mean(0) - 0.75).abs().max() < 0.04
    assert (mask.mean(1) - 0.75).abs().max() < 0.3
    centred = mask - 0.75
    assert (centred[1:] * centred[:-1]).mean().abs() < 0.003
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 0.003
    assert not torch.equal(mask, keep_mask(ids, 64, key=12346, rate=0.25).float())


def test_dropout_follows_the_token_and_not_its_place(model, ids):
    adapt(model, model.arch, dropout=0.3)
    randomise_b(model)
    numbers = torch.arange(len(ids)) + 1000
    key = DropoutKey(seed=1, step=2)
    whole = logits(model, ids, token_ids=numbers, dropout=key)
    other = logits(model, ids, token_ids=numbers + 1, dropout=key)
    assert not torch.equal(whole, other)
    pair = torch.cat((ids, ids))
    both = model.logits(model(pair, ForwardContext.packed(
        [60, 60], token_ids=torch.cat((numbers + 1, numbers)), dropout=key)))
    assert relative_error(both[60:], whole) <= 1e-5


def test_recomputation_gives_the_same_loss_and_gradients_bit_for_bit(model, ids):
    adapt(model, model.arch, dropout=0.3)
    randomise_b(model)
    results = []
    for recompute in ("none", "layer", "selective"):
        model.zero_grad(set_to_none=True)
        ctx = ForwardContext.packed(
            [len(ids)], recompute=recompute, tape=ChoiceTape(),
            token_ids=torch.arange(len(ids)), dropout=DropoutKey(1, 2),
        )
        loss = model.token_losses(model(ids, ctx)[:-1], ids[1:]).sum()
        loss.backward()
        results.append([loss, *(p.grad for p in lora_parameters(model).values())])
    for kept, *again in zip(*results, strict=True):
        assert all(torch.equal(kept, each) for each in again)


def test_forced_choices_are_used_exactly_once(model, ids):
    tape = ChoiceTape()
    free = logits(model, ids, tape=tape)
    forced = ChoiceTape("force", tape.choices)
    assert torch.equal(logits(model, ids, tape=forced), free)
    forced.check_all_used()
    extra = ChoiceTape("force", {**tape.choices, (99, "experts"): ids})
    logits(model, ids, tape=extra)
    with pytest.raises(RuntimeError, match="99"):
        extra.check_all_used()
    missing = dict(tape.choices)
    missing.pop(next(iter(missing)))
    with pytest.raises(RuntimeError, match="not on the tape"):
        logits(model, ids, tape=ChoiceTape("force", missing))


def test_forced_routing_changes_the_result_and_keeps_gradients(model, ids):
    tape = ChoiceTape()
    free = logits(model, ids, tape=tape)
    key = next(k for k in tape.choices if k[1] == "experts")
    moved = {**tape.choices, key: (tape.choices[key] + 1) % 16}
    assert not torch.equal(logits(model, ids, tape=ChoiceTape("force", moved)), free)


def test_padding_is_kept_out_of_the_routing_statistics(model, ids):
    seen: dict[int, Tensor] = {}
    valid = torch.ones(len(ids), dtype=torch.bool)
    valid[-10:] = False

    def count(routing: Routing) -> None:
        seen[routing.layer] = routing.tokens_per_expert

    logits(model, ids, valid=valid, stats=count)
    top_k = model.arch.layers[1].ffn.top_k
    assert set(seen) == {i for i, layer in enumerate(model.arch.layers) if i > 0 and layer}
    assert all(int(counts.sum()) == 50 * top_k for counts in seen.values())


def test_batched_generation_equals_one_prompt_at_a_time(model, ids):
    prompts = [ids[:5].tolist(), ids[:23].tolist(), ids[40:41].tolist()]
    stop = [int(ids[0])]
    together = generate(model, prompts, 12, stop)
    assert together == [generate(model, [p], 12, stop)[0] for p in prompts]
    assert together == [list(stream(model, p, 12, stop)) for p in prompts]
    assert all(stop[0] not in answer for answer in together)


def test_generation_equals_full_forward_passes(model, ids):
    prompt = ids[:20].tolist()
    answer = generate(model, [prompt], 8, [])[0]
    sequence = list(prompt)
    for token in answer:
        assert int(logits(model, torch.tensor(sequence))[-1].argmax()) == token
        sequence.append(token)


def test_unknown_operators_are_refused():
    arch = load_arch(preset_config("k3-tiny"), "k3-tiny")
    with pytest.raises(ConfigError, match=r"ops\.kdaa"):
        build_model(arch, ops={"kdaa": "chunk"})
    with pytest.raises(ConfigError, match="native, chunk, reference"):
        build_model(arch, ops={"kda": "cuda"})


def test_reference_operators_give_the_same_model(checkpoint, ids):
    arch = load_arch(random_k3.tiny_config(True), "tiny")
    fast = load_model(checkpoint[0], base_dtype="fp64", compute_dtype=torch.float64)[0]
    slow = build_model(
        arch, base_dtype="fp64", compute_dtype=torch.float64,
        ops={"kda": "reference", "attention": "reference"},
    ).to_empty(device="cpu")
    slow.load_state_dict(fast.state_dict())
    assert relative_error(logits(slow, ids), logits(fast, ids)) <= 1e-12
