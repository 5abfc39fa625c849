"""The whole model of glm5_next: caches, packs, adapters, images, files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracles import random_glm5_next
from tests.parity.cases import media_prompt
from tests.support.compare import relative_error
from tests.support.prompts import Prompt, image_batch
from tests.unit.train.tiny_run import tiny_glm5_next
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.maps import mtp_tensors
from trimtab.arch.params import inventory
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.adapter import AdapterMeta, load_adapter, save_adapter
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.errors import DataError
from trimtab.models.build import build_model
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.models.full import full_parameters, train_full
from trimtab.models.generate import generate, stream
from trimtab.models.lora import disabled, inject, lora_parameters, merge
from trimtab.models.tape import ChoiceTape
from trimtab.verify.dump import DUMP_FILE, write_dump
from trimtab.verify.merged import check_merge

CONFIG = random_glm5_next.tiny_config()
WORDS = ("attention", "dense_ffn", "shared_experts", "projector")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm5_next") / "model"
    random_glm5_next.write_checkpoint(path, CONFIG, seed=1)
    return path


@pytest.fixture
def model(checkpoint: Path) -> CausalLM:
    return load_model(checkpoint, base_dtype="fp32")[0]


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    grids = [((1, 2, 4), False), ((2, 2, 2), True)]
    return media_prompt(CONFIG, *random_glm5_next.media_prompt(CONFIG, grids, 60, seed=2))


def adapt(model: CausalLM, b: float) -> None:
    targets = resolve_targets(model.arch, target_modules=WORDS, rank=4, alpha=8, dropout=0.0)
    inject(model, targets, seed=5)
    draw = torch.Generator().manual_seed(3)
    for name, p in lora_parameters(model).items():
        if name.endswith(".B"):
            p.data.copy_(torch.randn(p.shape, generator=draw) * b)


def logits(model: CausalLM, prompt: Prompt, **fields: object) -> Tensor:
    ctx = ForwardContext.packed(
        [len(prompt.ids)], images=image_batch([prompt]), **fields  # type: ignore[arg-type]
    )
    return model.logits(model(torch.tensor(prompt.ids), ctx))


def test_the_tower_has_exactly_its_parameters() -> None:
    arch = load_arch(preset_config("glm5-next-tiny"))
    owners = ("vision", "projector")
    built = {n: tuple(p.shape) for n, p in build_model(arch).named_parameters()}
    assert {n: s for n, s in built.items() if n.startswith(owners)} == {
        p.name: p.shape for p in inventory(arch) if p.owner in owners
    }


def test_batched_generation_equals_one_prompt_at_a_time(model: CausalLM) -> None:
    words = random_glm5_next.random_words(CONFIG, 60, seed=4)
    prompts = [words[:5], words[:34], words[40:41]]
    stop = [words[0]]
    together = generate(model, prompts, 25, stop)
    assert together == [generate(model, [p], 25, stop)[0] for p in prompts]
    assert together == [list(stream(model, p, 25, stop)) for p in prompts]
    sequence = list(prompts[1])
    for token in together[1]:
        assert int(logits(model, Prompt(sequence))[-1].argmax()) == token
        sequence.append(token)


@torch.no_grad()
def test_without_the_tail_a_query_before_the_first_pool_sees_nothing(tmp_path: Path) -> None:
    config = random_glm5_next.tiny_config(index_kpool_always_select_tail=False)
    random_glm5_next.write_checkpoint(tmp_path / "m", config, seed=1)
    model = load_model(tmp_path / "m", base_dtype="fp64")[0]
    ids = random_glm5_next.random_words(config, 40, seed=4)
    full = logits(model, Prompt(ids))
    assert bool(full.isfinite().all())
    cache, out = model.new_cache(1), []
    for begin, end in ((0, 2), (2, 19), *((n, n + 1) for n in range(19, 40))):
        ctx = ForwardContext.packed([end - begin], cache=cache)
        out.append(model.logits(model(torch.tensor(ids[begin:end]), ctx)))
    assert relative_error(torch.cat(out), full) < 1e-12


def test_an_adapter_with_zero_b_is_the_base(model: CausalLM, prompt: Prompt) -> None:
    before = logits(model, prompt)
    adapt(model, 0.0)
    assert torch.equal(logits(model, prompt), before)


def test_every_adapted_tensor_gets_a_gradient_recomputed_or_not(
    model: CausalLM, prompt: Prompt
) -> None:
    adapt(model, 0.05)
    results = []
    for recompute in ("none", "layer", "selective"):
        model.zero_grad(set_to_none=True)
        ctx = ForwardContext.packed(
            [len(prompt.ids)], recompute=recompute, tape=ChoiceTape(), images=image_batch([prompt])
        )
        ids = torch.tensor(prompt.ids)
        loss = model.token_losses(model(ids, ctx)[:-1], ids[1:]).sum()
        loss.backward()
        results.append([loss, *(p.grad for p in lora_parameters(model).values())])
    for name, p in lora_parameters(model).items():
        assert p.grad is not None and bool(p.grad.any()), name
    for kept, *again in zip(*results, strict=True):
        assert all(torch.equal(kept, each) for each in again)


def test_merging_equals_the_adapter(model: CausalLM, prompt: Prompt) -> None:
    adapt(model, 0.05)
    adapted = logits(model, prompt)
    merge(model)
    assert relative_error(logits(model, prompt), adapted) <= 1e-5


def test_the_merger_is_trained_in_full_with_its_norm(model: CausalLM, prompt: Prompt) -> None:
    before = logits(model, prompt)
    train_full(model, [n for n, _ in model.named_parameters() if n.startswith("projector.")])
    parameters = full_parameters(model)
    assert set(parameters) == {p.name for p in inventory(model.arch) if p.owner == "projector"}
    for parameter in parameters.values():
        parameter.data.add_(0.1)
    after = logits(model, prompt)
    assert relative_error(after, before) > 1e-3
    with disabled(model):
        assert torch.equal(logits(model, prompt), before)
    assert torch.equal(logits(model, prompt), after)
    merge(model)
    assert not full_parameters(model)
    assert torch.equal(logits(model, prompt), after)


@torch.no_grad()
def test_a_still_image_is_repeated_over_the_frames_of_a_patch(model: CausalLM) -> None:
    ids, (item,) = random_glm5_next.media_prompt(CONFIG, [((1, 2, 4), False)], 20, seed=1)
    still = item.patches[:, :, 0]
    rows = torch.arange(*item.span)
    found = [
        model(torch.tensor(ids), ForwardContext.packed(
            [20], images=ImageBatch(patches, (item.grid,), rows)))
        for patches in (still, still.unsqueeze(2).expand(-1, -1, 2, -1, -1))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids, c: [c["image_start_token_id"] if i == c["video_start_token_id"] else i
                         for i in ids], "stands between the tokens"),
        (lambda ids, c: [*ids[:-1], c["video_token_id"]], "use the placeholder of images"),
    ],
)
def test_videos_outside_their_tokens_are_refused(
    model: CausalLM, prompt: Prompt, change: object, words: str
) -> None:
    moved = Prompt(change(prompt.ids, CONFIG), prompt.media, prompt.images, prompt.spans)  # type: ignore[operator]
    with pytest.raises(DataError, match=words):
        logits(model, moved)


def test_layers_of_multi_token_prediction_are_recognised_and_skipped(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = copy.deepcopy(CONFIG)
    config["text_config"]["num_nextn_predict_layers"] = 1
    random_glm5_next.write_checkpoint(tmp_path / "m", config, seed=1)
    arch = load_arch(config)
    names = {tensor.name: tensor.shape for tensor in mtp_tensors(arch)}
    layer = "model.language_model.layers.4."
    assert names[f"{layer}eh_proj.weight"] == (32, 64)
    assert len(names) == 25 + 3 * config["text_config"]["n_routed_experts"]
    assert not any("hc_" in name for name in names)
    more = {name: torch.zeros(shape) for name, shape in names.items()}
    file = tmp_path / "m" / "model.safetensors"
    save_file({**load_file(file), **more}, file)
    ids = Prompt(random_glm5_next.random_words(CONFIG, 9, seed=1))
    with_mtp = load_model(tmp_path / "m", base_dtype="fp32")[0]
    without = load_model(checkpoint, base_dtype="fp32")[0]
    assert torch.equal(logits(with_mtp, ids), logits(without, ids))


def test_random_weights_dump_adapter_and_merge(tmp_path: Path) -> None:
    """The way of a checkpoint through the verbs: init, dump, an adapter's files, merge."""
    config = tiny_glm5_next()
    arch = load_arch(config)
    init_checkpoint(arch, config, tmp_path / "m", seed=7)
    write_dump(tmp_path / "m", [[5, 6, 7, 8, 9]], tmp_path / "d", "float64")
    dump = load_file(tmp_path / "d" / DUMP_FILE)
    assert dump["hidden.0.3"].shape == (5, 4, 32)
    assert dump["hidden.0.final"].shape == (5, 32)
    model = load_model(tmp_path / "m")[0]
    adapt(model, 0.1)
    targets = resolve_targets(arch, target_modules=WORDS, rank=4, alpha=8, dropout=0.0)
    tensors = lora_parameters(model)
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta(str(tmp_path / "m")))
    adapter = load_adapter(tmp_path / "a", arch)
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out", adapter=adapter)
    verdicts = check_merge(tmp_path / "m", adapter, tmp_path / "out")
    assert all(v.passed for v in verdicts), verdicts
    names = {n for n in load_file(tmp_path / "out" / "model.safetensors") if ".experts." in n}
    assert "model.language_model.layers.1.mlp.experts.3.gate_proj.weight" in names
