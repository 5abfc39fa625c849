"""Mistakes planted in the modules of glm5_next are seen by the comparison with transformers, by name.

Each mutation changes one function, constant or weight of our model; the logits of a prompt with
two images and a video must then leave the tolerance that the true ones stay inside. Weights are
scaled so that every clamp is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracles import random_glm5_next
from tests.oracles.run_hf import run_hf
from tests.parity.cases import MEDIA, media_prompt
from tests.support.compare import relative_error
from tests.support.prompts import Prompt, image_batch
from trimtab.arch.spec import ActivationSpec
from trimtab.checkpoint.load import load_model
from trimtab.models import axial_vision, indexer, residual
from trimtab.models.axial_vision import AxialAttention, Merger
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.indexer import PooledIndexer
from trimtab.models.mla import MLA
from trimtab.models.moe import GatedFFN
from trimtab.models.residual import HyperSite
from trimtab.ops.activation import gated_activation
from trimtab.ops.attention import select
from trimtab.ops.hyper import hyper_write
from trimtab.verify.tolerances import limit

pytestmark = pytest.mark.parity

LIMIT = limit("model.logits.float64")
SEEN = 5 * LIMIT  # a mistake must show outside the tolerance, the true model is below 1e-13
SCALE = 8.0  # of what enters a gated activation, whose clamp is at 10

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Prompt, Tensor]:
    """A model, a prompt and transformers' logits."""
    folder: Path = tmp_path_factory.mktemp("glm5_next")
    config = random_glm5_next.tiny_config()
    random_glm5_next.write_checkpoint(folder, config, seed=3, scale=SCALE)
    ids, items = random_glm5_next.media_prompt(config, MEDIA[1], 70, seed=3)
    inputs = random_glm5_next.processor_output(config, items)
    named = {f"{name}.0": value for name, value in inputs.items()}
    logits = run_hf(folder, [ids], grads=False, inputs=named)["logits.0"]
    model, _ = load_model(folder, base_dtype="fp64", compute_dtype=torch.float64)
    return model, media_prompt(config, ids, items), logits


@torch.no_grad()
def error_of(case: tuple[CausalLM, Prompt, Tensor]) -> float:
    model, prompt, logits = case
    ctx = ForwardContext.packed([len(prompt.ids)], images=image_batch([prompt]))
    return relative_error(model.logits(model(torch.tensor(prompt.ids), ctx)), logits)


def each(model: nn.Module, kind: type, name: str, change: Callable, patch: Patch) -> None:
    """Replace an attribute of every module of a kind."""
    found = [module for module in model.modules() if isinstance(module, kind)]
    assert found
    for module in found:
        patch.setattr(module, name, change(getattr(module, name)))


def each_part(model: nn.Module, kind: type, name: str, change: Callable, patch: Patch) -> None:
    """Replace a parameter or child of every module of a kind."""
    for module in (module for module in model.modules() if isinstance(module, kind)):
        parts = module._parameters if name in module._parameters else module._modules
        patch.setitem(parts, name, change(parts[name]))


def unclamped(part: str) -> Callable[[CausalLM, Patch], None]:
    """Take the clamp from the gated activations of the modules whose name holds `part`."""

    def change(model: CausalLM, patch: Patch) -> None:
        found = [m for n, m in model.named_modules() if part in f".{n}" and hasattr(m, "activation")]
        assert found
        for module in found:
            patch.setattr(module, "activation", replace(module.activation, clamp=None))

    return change


def spec(**fields: float) -> Callable[[CausalLM, Patch], None]:
    """Change constants of the hyper-connections."""
    return lambda model, patch: each(model, HyperSite, "spec", lambda s: replace(s, **fields), patch)


def written(**change: Callable[[Tensor], Tensor]) -> Callable[[CausalLM, Patch], None]:
    """Change how a block's output is written."""

    def write(streams: Tensor, y: Tensor, mix: residual.HyperMix) -> Tensor:
        fields = {name: f(getattr(mix, name)) for name, f in change.items()}
        return hyper_write(streams, y, replace(mix, **fields))

    return lambda model, patch: patch.setattr(model, "ops", replace(model.ops, hyper_write=write))


def rule(**fields: bool) -> Callable[[CausalLM, Patch], None]:
    """Change how pools are selected."""
    return lambda model, patch: each(model, PooledIndexer, "rule", lambda r: replace(r, **fields), patch)


def zeroed(name: str) -> Callable[[CausalLM, Patch], None]:
    """Ignore a weight of the indexer."""
    zero = lambda p: nn.Parameter(torch.zeros_like(p), requires_grad=False)  # noqa: E731
    return lambda model, patch: each_part(model, PooledIndexer, name, zero, patch)


def latent_eps(model: CausalLM, patch: Patch) -> None:
    for module in (m for m in model.modules() if isinstance(m, MLA)):
        for norm in (module.q_a_layernorm, module.kv_a_layernorm):
            patch.setattr(norm, "eps", 1e-6)


def sums_streams(model: CausalLM, patch: Patch) -> None:
    patch.setattr(residual.HyperState, "finish", lambda self, _: self.streams.sum(1))


def sees_open_pools(model: CausalLM, patch: Patch) -> None:
    """A query may select a pool whose last token follows it."""
    true = select.select_mask
    early = lambda scores, visible, k: true(scores, visible.roll(-1, 0), k)  # noqa: E731
    patch.setattr(select, "select_mask", early)


def clamps_gate_below(model: CausalLM, patch: Patch) -> None:
    def low(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
        assert spec.clamp is not None
        return gated_activation(spec, gate.clamp(min=-spec.clamp / 2), up)

    each(model, GatedFFN, "act", lambda _: low, patch)


def swaps_axes(model: CausalLM, patch: Patch) -> None:
    true = axial_vision.axial_angles

    def swapped(grid: tuple[int, int, int], dim: int, theta: float) -> Tensor:
        return true(grid, dim, theta).roll(dim // 4, -1)

    patch.setattr(axial_vision, "axial_angles", swapped)


def interleaves(model: CausalLM, patch: Patch) -> None:
    true = axial_vision.rotate
    patch.setattr(axial_vision, "rotate", lambda x, c, s, _: true(x, c, s, "interleaved"))


def attends_across_slices(model: CausalLM, patch: Patch) -> None:
    true = axial_vision.image_attention

    def joined(q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]) -> Tensor:
        return true(q, k, v, scale, (lengths[0], sum(lengths[1:4]), *lengths[4:]))

    patch.setattr(axial_vision, "image_attention", joined)


def merges_by_columns(model: CausalLM, patch: Patch) -> None:
    assert model.vision is not None
    kernel = model.vision.downsample
    turned = nn.Parameter(kernel.weight.transpose(2, 3), requires_grad=False)
    patch.setitem(kernel._parameters, "weight", turned)


def approximate_gelu(model: CausalLM, patch: Patch) -> None:
    true = functional.gelu
    patch.setattr(axial_vision.functional, "gelu", lambda x: true(x, approximate="tanh"))


MUTATIONS: dict[str, Callable[[CausalLM, Patch], None]] = {
    "hc_eps dropped": spec(eps=0.0),
    "norm eps of the mix": spec(norm_eps=1e-6),
    "19 Sinkhorn steps": spec(sinkhorn_steps=19),
    "streams summed": sums_streams,
    "comb not transposed": written(comb=lambda comb: comb.mT),
    "post without 2x": written(post=lambda post: post / 2),
    "dense FFN without clamp": unclamped(".layers.0.mlp"),
    "shared experts without clamp": unclamped(".shared_experts"),
    "routed experts without clamp": unclamped(".experts"),
    "tower without clamp": unclamped(".vision.blocks"),
    "merger without clamp": unclamped(".projector"),
    "gate clamped from below": clamps_gate_below,
    "tail left out": rule(tail=False),
    "open pools visible": sees_open_pools,
    "slot biases ignored": zeroed("index_kpool_compress_ape"),
    "pool gate ignored": zeroed("index_kpool_compress_gate"),
    "latent norms with 1e-6": latent_eps,
    "rows and columns swapped": swaps_axes,
    "rotation interleaved": interleaves,
    "query heads not normed": lambda model, patch: each_part(
        model, AxialAttention, "q_norm", lambda _: nn.Identity(), patch
    ),
    "attention across slices": attends_across_slices,
    "kernel read by columns": merges_by_columns,
    "tanh GELU in the merger": approximate_gelu,
    "layer norm with another eps": lambda model, patch: each(
        model, Merger, "eps", lambda _: 1e-6, patch
    ),
}


def test_the_true_model_stays_inside_and_reaches_its_clamps(
    case: tuple[CausalLM, Prompt, Tensor]
) -> None:
    assert error_of(case) <= LIMIT


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_mistake_is_seen(
    name: str, case: tuple[CausalLM, Prompt, Tensor], monkeypatch: Patch
) -> None:
    MUTATIONS[name](case[0], monkeypatch)
    assert error_of(case) > SEEN
    monkeypatch.undo()
    assert error_of(case) <= LIMIT


def test_pools_counted_from_the_start_of_a_pack_are_seen(
    case: tuple[CausalLM, Prompt, Tensor], monkeypatch: Patch
) -> None:
    """Transformers knows no packs, so a pack is held against its documents alone."""
    model, prompt, _ = case
    text = [i for i in prompt.ids if i < 90]
    ids = torch.tensor([*text[:5], *text])

    @torch.no_grad()
    def packed() -> Tensor:
        return model.logits(model(ids, ForwardContext.packed([5, len(text)])))[5:]

    with torch.no_grad():
        alone = model.logits(model(torch.tensor(text), ForwardContext.packed([len(text)])))
    assert relative_error(packed(), alone) <= LIMIT
    true = select.pool_starts

    def over_borders(lengths: tuple[int, ...], size: int) -> list[int]:
        return true((sum(lengths),), size)[: len(true(lengths, size))]

    for module in (indexer, select):
        monkeypatch.setattr(module, "pool_starts", over_borders)
    assert relative_error(packed(), alone) > SEEN
