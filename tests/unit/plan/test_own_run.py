"""Predicted memory of our own runs: what layers keep is what autograd saves, tensor by tensor."""

from __future__ import annotations

import re

import pytest
import torch

from trimtab.arch.adapter import Experts, LoRATarget, resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import ArchSpec, MLASpec
from trimtab.models import decoder
from trimtab.models.build import build_model
from trimtab.models.context import ForwardContext, Recompute
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import inject
from trimtab.models.tape import ChoiceTape
from trimtab.ops.keep import KeptResults
from trimtab.plan.own_run import RunShape, kept_by_layer, predict_run, results_by_layer
from trimtab.train.predicted import gathers_latents

TOKENS = 256


def adapted(
    preset: str, words: tuple[str, ...], rank: int, experts: Experts = "none"
) -> tuple[ArchSpec, tuple[LoRATarget, ...], CausalLM]:
    """Architecture, targets, and a model with adapters."""
    arch = load_arch(preset_config(preset), preset)
    model = build_model(arch, base_dtype="fp32", vision=False).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    targets = resolve_targets(
        arch, target_modules=words, rank=rank, alpha=32, dropout=0.0, experts=experts
    )
    inject(model, targets, seed=1)
    return arch, targets, model


def token_ids() -> torch.Tensor:
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1))


def shape_of(arch: ArchSpec, recompute: Recompute) -> RunShape:
    gathers = frozenset(
        index for index, layer in enumerate(arch.layers)
        if isinstance(layer.mixer, MLASpec) and gathers_latents(layer.mixer, TOKENS, TOKENS)
    )
    return RunShape(TOKENS, TOKENS, recompute=recompute, gathers=gathers)


def saved_by_layer(model: CausalLM) -> dict[int, int]:
    """Bytes of distinct tensors that autograd saves in each layer's forward pass."""
    stack: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: stack.append(names[m]))
        module.register_forward_hook(lambda m, _, __: stack.pop() and None)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: dict[int, torch.Tensor] = {}
    found: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        layer = re.match(r"layers\.(\d+)", stack[-1] if stack else "")
        if layer and place not in weights and place not in alive:
            alive[place] = tensor
            size = tensor.untyped_storage().nbytes()
            found[int(layer[1])] = found.get(int(layer[1]), 0) + size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(token_ids(), ForwardContext.packed([TOKENS]))
    return found


PRESETS = ("kimi-linear-tiny", "k3-tiny", "glm5-next-tiny", "deepseek-v3.2-tiny")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("words", "rank"), [(("attention",), 8), (("o_proj", "shared_experts"), 32)])
def test_a_layer_keeps_what_autograd_saves(preset: str, words: tuple[str, ...], rank: int) -> None:
    arch, targets, model = adapted(preset, words, rank)
    saved = saved_by_layer(model)
    said = kept_by_layer(arch, targets, shape_of(arch, "none"))
    for layer in range(2, arch.num_layers):
        assert said[layer] == pytest.approx(saved[layer], rel=0.03), layer


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experts", ["none", "per_expert", "shared_outer"])
def test_selective_recomputation_keeps_of_a_layer_what_is_said(
    preset: str, experts: Experts, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, targets, model = adapted(preset, ("attention",), 8, experts)
    layers: list[KeptResults] = []

    class Noted(KeptResults):
        def __init__(self) -> None:
            super().__init__()
            layers.append(self)

    monkeypatch.setattr(decoder, "KeptResults", Noted)
    ctx = ForwardContext.packed([TOKENS], recompute="selective", tape=ChoiceTape())
    hidden = model(token_ids(), ctx)
    said = results_by_layer(arch, targets, shape_of(arch, "selective"))
    assert len(layers) == arch.num_layers and sum(said) > 0
    for index, kept in enumerate(layers):
        tensors = [each for result in kept._results for each in result]  # type: ignore[attr-defined]
        assert sum(each.untyped_storage().nbytes() for each in tensors) == said[index], index
    assert hidden.requires_grad


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experts", ["none", "shared_outer"])
def test_a_layer_under_selective_recomputation_keeps_what_autograd_saves(
    preset: str, experts: Experts
) -> None:
    arch, targets, model = adapted(preset, ("attention",), 8, experts)
    with KeptResults().recording():
        saved = saved_by_layer(model)
    said = kept_by_layer(arch, targets, shape_of(arch, "selective"))
    for layer in range(2, arch.num_layers):
        assert said[layer] == pytest.approx(saved[layer], rel=0.03), layer


def peak(preset: str, **values: object) -> float:
    arch = load_arch(preset_config(preset), preset)
    rank = values.pop("rank", 8)
    experts = values.pop("experts", "none")
    targets = resolve_targets(arch, target_modules=("attention",), rank=rank, alpha=16,  # type: ignore[arg-type]
                              dropout=0.0, experts=experts)  # type: ignore[arg-type]
    shape = RunShape(**({"tokens": 8192, "sequence": 4096, "recompute": "none"} | values))  # type: ignore[arg-type]
    memory = predict_run(arch, targets, shape)
    assert memory.peak == pytest.approx(sum(memory.lines.values()))
    return memory.peak


def test_what_a_choice_does_to_the_peak() -> None:
    base = peak("kimi-linear-tiny")
    layer, selective = (peak("kimi-linear-tiny", recompute=form) for form in ("layer", "selective"))
    assert layer < selective < 0.5 * base
    assert peak("kimi-linear-tiny", tokens=16384) == pytest.approx(2 * base, rel=0.05)
    assert peak("kimi-linear-tiny", rank=64) > base
    # A byte per element of every adapter's input, and 32 for the masks being made.
    with_masks = peak("kimi-linear-tiny", dropout=True)
    assert base + 8192 * 32 * 128 < with_masks < 1.5 * base
    assert peak("kimi-linear-tiny", experts="per_expert") > base


def test_sizes_of_tiles_are_those_of_the_operators() -> None:
    from trimtab.ops.attention import packs, tiles
    from trimtab.ops.fused import cross_entropy
    from trimtab.ops.moe import experts, loop
    from trimtab.plan import own_moments as said

    assert (said.LOSS_ROWS, said.LOSS_TILE) == (cross_entropy._ROWS, cross_entropy._TILE_ELEMENTS)
    assert (said.SCORE_TILE, said.QUERY_BLOCK) == (tiles.BUFFER_ELEMENTS, packs.QUERY_BLOCK)
    assert (said.EXPERT_KEPT, said.EXPERT_BUFFER) == (experts.KEPT_BYTES, loop._BUFFER_BYTES)
