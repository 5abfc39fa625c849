"""Images in the decoder: nothing leaks, adapters start as nothing, masks follow the token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.compare import relative_error
from tests.unit.checkpoint.tiny import k3_config, make
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_tensors
from trimtab.arch.params import inventory
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.save import tensors_from_model
from trimtab.errors import CheckpointError, DataError
from trimtab.models.build import build_model
from trimtab.models.context import DropoutKey, ForwardContext, ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.models.full import full_parameters, train_full
from trimtab.models.generate import generate, stream
from trimtab.models.lora import (
    disabled,
    inject,
    lora_parameters,
    merge,
    trainable_parameters,
)
from trimtab.ops.vision import image_attention

IMAGE = 3  # placeholder of the toy model
GRIDS = ((1, 2, 4), (1, 4, 4), (2, 2, 4))
IDS = torch.tensor([5, 6, 3, 3, 7, 8, 3, 3, 3, 3, 9, 10, 11, 3, 3, 12])
LENGTHS = (6, 10)


def batch(seed: int = 0) -> ImageBatch:
    draw = torch.Generator().manual_seed(seed)
    patches = [torch.rand(t * h * w, 3, 14, 14, generator=draw) * 2 - 1 for t, h, w in GRIDS]
    rows = (IDS == IMAGE).nonzero().squeeze(1).tolist()
    made = ImageBatch.join(patches, GRIDS, rows)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k3") / "model"
    make(path, k3_config())
    return path


@pytest.fixture
def model(checkpoint: Path) -> CausalLM:
    return load_model(checkpoint)[0]


def adapt(model: CausalLM, dropout: float = 0.0, b: float = 0.0) -> None:
    words = ["attention", "projector"]
    inject(model, resolve_targets(model.arch, target_modules=words, rank=4, alpha=8,
                                  dropout=dropout), seed=5)
    draw = torch.Generator().manual_seed(3)
    for name, p in lora_parameters(model).items():
        if name.endswith(".B"):
            p.data.copy_(torch.randn(p.shape, generator=draw) * b)


def logits(model: CausalLM, images: ImageBatch, **fields: object) -> Tensor:
    ctx = ForwardContext.packed(LENGTHS, images=images, **fields)  # type: ignore[arg-type]
    return model.logits(model(IDS, ctx))


def test_the_demo_preset_is_built_with_exactly_its_vision_parameters() -> None:
    arch = load_arch(preset_config("k3.1-tiny"))
    built = {n: tuple(p.shape) for n, p in build_model(arch).named_parameters()}
    wanted = {p.name: p.shape for p in inventory(arch) if p.owner in ("vision", "projector")}
    assert len(wanted) == 18
    assert {n: s for n, s in built.items() if n.startswith(("vision.", "projector."))} == wanted


def test_a_model_without_vision_holds_no_tower_and_says_so(checkpoint: Path) -> None:
    text, arch = load_model(checkpoint, vision=False)
    assert not any(n.startswith(("vision", "projector")) for n, _ in text.named_parameters())
    with pytest.raises(DataError, match="without a vision tower"):
        logits(text, batch())
    stored = next(s for s in stored_tensors(arch) if s.param == "projector.proj.0.weight")
    with pytest.raises(CheckpointError, match="built without vision"):
        tensors_from_model(text, arch)(stored)


def test_attention_stays_inside_each_image_whatever_their_sizes() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = (4, 6, 4, 1)
    q, k, v = (torch.randn(15, 2, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    found = image_attention(q, k, v, 0.3, lengths)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        scores = torch.einsum("nhk,mhk->hnm", q[rows], k[rows]) * 0.3
        wanted = torch.einsum("hnm,mhv->nhv", scores.softmax(-1), v[rows])
        assert relative_error(found[rows], wanted) < 1e-14
        begin += length


@torch.no_grad()
def test_another_image_in_one_sequence_moves_no_bit_of_the_other(model: CausalLM) -> None:
    before, changed = batch(), batch()
    changed.patches[8:] += 0.5  # images of the second sequence
    one, two = logits(model, before), logits(model, changed)
    assert torch.equal(one[: LENGTHS[0]], two[: LENGTHS[0]])
    assert not torch.equal(one[LENGTHS[0] :], two[LENGTHS[0] :])
    changed = batch()
    changed.patches[:8] += 0.5
    three = logits(model, changed)
    assert torch.equal(one[LENGTHS[0] :], three[LENGTHS[0] :])
    assert not torch.equal(one[: LENGTHS[0]], three[: LENGTHS[0]])


@torch.no_grad()
def test_a_zero_b_reproduces_the_base_with_images_bit_for_bit(model: CausalLM) -> None:
    before = logits(model, batch())
    adapt(model)
    assert torch.equal(logits(model, batch()), before)
    ids = torch.arange(len(IDS))
    dropped = logits(model, batch(), token_ids=ids, dropout=DropoutKey(1, 2))
    assert torch.equal(dropped, before)


@torch.no_grad()
def test_a_projector_adapter_moves_image_rows_only_and_can_be_switched_off(
    model: CausalLM,
) -> None:
    before = logits(model, batch())
    adapt(model, b=0.05)
    with disabled(model):
        assert torch.equal(logits(model, batch()), before)
    seen: dict[str, Tensor] = {}
    logits(model, batch(), observe=seen.__setitem__)
    plain: dict[str, Tensor] = {}
    with disabled(model):
        logits(model, batch(), observe=plain.__setitem__)
    moved = (seen["embed"] != plain["embed"]).any(-1)
    assert torch.equal(moved, IDS == IMAGE)


def test_every_projector_tensor_gets_a_gradient_and_nothing_else_of_vision(
    model: CausalLM,
) -> None:
    adapt(model, b=0.05)
    for recompute in ("none", "layer", "selective"):
        model.zero_grad(set_to_none=True)
        logits(model, batch(), recompute=recompute).square().mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        names = {n for n in grads if n.startswith(("vision.", "projector."))}
        assert names == {f"projector.proj.{n}.lora.{m}" for n in (0, 2) for m in "AB"}
        assert all(bool(grads[n].any()) for n in names)


def test_dropout_in_the_projector_follows_the_global_token(model: CausalLM) -> None:
    """The second sequence alone, with its own token numbers, drops what it drops in the pack."""
    adapt(model, dropout=0.5, b=0.05)
    key, ids = DropoutKey(1, 2), torch.arange(100, 100 + len(IDS))
    seen: dict[str, Tensor] = {}
    logits(model, batch(), token_ids=ids, dropout=key, observe=seen.__setitem__)
    cut, whole = LENGTHS[0], batch()
    second = ImageBatch(whole.patches[8:], GRIDS[1:], whole.rows[2:] - cut)
    alone: dict[str, Tensor] = {}
    ctx = ForwardContext.packed(LENGTHS[1:], images=second, token_ids=ids[cut:], dropout=key,
                                observe=alone.__setitem__)
    model(IDS[cut:], ctx)
    assert relative_error(alone["embed"], seen["embed"][cut:]) < 1e-6
    other = replace(ctx, token_ids=ids[cut:] + 1)
    model(IDS[cut:], other)
    assert relative_error(alone["embed"], seen["embed"][cut:]) > 1e-3


@torch.no_grad()
def test_full_training_keeps_a_float32_master_and_gives_the_base_back(model: CausalLM) -> None:
    before = logits(model, batch())
    train_full(model, [n for n, _ in model.named_parameters() if n.startswith("projector.")])
    full = full_parameters(model)
    assert set(full) == {f"projector.{n}.weight" for n in ("proj.0", "proj.2", "post_norm")}
    assert all(p.dtype is torch.float32 and p.requires_grad for p in full.values())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(full)
    assert torch.equal(logits(model, batch()), before)
    for p in full.values():
        p.data.mul_(2.0)  # exact in bfloat16 too
    trained = logits(model, batch())
    assert not torch.equal(trained, before)
    with disabled(model):
        assert torch.equal(logits(model, batch()), before)
    assert trainable_parameters(model).keys() == full.keys()
    merge(model)
    assert not trainable_parameters(model) and model.projector is not None
    assert model.projector.post_norm.weight.dtype is torch.bfloat16
    assert torch.equal(logits(model, batch()), trained)


def test_generation_with_images_equals_the_whole_pass(model: CausalLM) -> None:
    cut = LENGTHS[0]
    prompts = [IDS[:cut].tolist(), IDS[cut:].tolist()]
    found = generate(model, prompts, 3, stop_ids=[], images=batch())
    ids, whole = IDS[cut:], batch()
    images = ImageBatch(whole.patches[8:], GRIDS[1:], whole.rows[2:] - cut)
    assert list(stream(model, prompts[1], 3, [], images=images)) == found[1]
    for token in found[1]:
        with torch.no_grad():
            hidden = model(ids, ForwardContext.packed([len(ids)], images=images))
        assert int(model.logits(hidden)[-1].argmax()) == token
        ids = torch.cat((ids, torch.tensor([token])))
    assert generate(model, prompts, 3, stop_ids=[], images=batch(1)) != found


@pytest.mark.parametrize(
    ("grids", "patches", "rows", "words"),
    [
        (((1, 2, 4),), 8, [2, 3], "2 rows given are not those of the placeholder"),
        (GRIDS, 31, None, "make 40 patches"),
        (GRIDS, 40, [2, 3, 6, 7, 8, 9, 13], "make 8 image tokens"),
        (((1, 3, 4), *GRIDS[1:]), 44, None, "multiples of 2"),
        (((5, 2, 4), *GRIDS[1:]), 72, None, "1 to 4 frames"),
        (((0, 2, 4), *GRIDS[1:]), 32, None, "1 to 4 frames"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    model: CausalLM, grids: tuple[tuple[int, int, int], ...], patches: int,
    rows: list[int] | None, words: str,
) -> None:
    where = batch().rows if rows is None else torch.tensor(rows)
    images = ImageBatch(torch.zeros(patches, 3, 14, 14), grids, where)
    with pytest.raises(DataError, match=words) as caught:
        logits(model, images)
    assert caught.value.code == "TT407"
