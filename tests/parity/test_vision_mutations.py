"""Mistakes planted in the vision tower are seen by the comparison with the naive tower, by name.

Each mutation replaces one function of our modules; the features of two images and a video must
then differ from the naive ones by more than the tolerance that the true ones stay inside.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.oracles import naive_vision, random_k3
from tests.oracles.random_tensors import save_checkpoint
from tests.parity.cases import image_prompt
from tests.support.compare import relative_error
from tests.support.prompts import Prompt, image_batch
from trimtab.arch.spec import VisionSpec
from trimtab.checkpoint.load import load_model
from trimtab.errors import DataError
from trimtab.models import vision
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.verify.tolerances import limit

pytestmark = pytest.mark.parity

GRIDS = ((1, 4, 6), (1, 6, 2), (3, 2, 4))
# A wrong layout or function is wrong by far; a wrong eps shows in float64 only.
GROSS = limit("model.logits.float32")
FINE = limit("model.logits.float64")

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Prompt, Tensor]:
    """A model, a prompt and the naive features of its images."""
    config = random_k3.tiny_config(True, vision=True, layers=4, experts=4, top_k=2)
    tensors = random_k3.random_checkpoint(config, seed=5)
    folder: Path = tmp_path_factory.mktemp("mutations")
    save_checkpoint(folder, config, tensors)
    model, _ = load_model(folder, base_dtype="fp64", compute_dtype=torch.float64)
    prompt = image_prompt(config, GRIDS, 0)
    tower = config["vision_config"]
    features = [naive_vision.image_features(tower, tensors, image) for image in prompt.images]
    return model, prompt, torch.cat(features)


@torch.no_grad()
def features(model: CausalLM, prompt: Prompt) -> Tensor:
    """What the model writes over the placeholder rows."""
    seen: dict[str, Tensor] = {}
    batch = image_batch([prompt])
    assert batch is not None
    ctx = ForwardContext.packed([len(prompt.ids)], images=batch, observe=seen.__setitem__)
    model(torch.tensor(prompt.ids), ctx)
    return seen["embed"][batch.rows]


def wrap(patch: Patch, owner: object, name: str, change: Callable[..., Tensor]) -> None:
    """Replace `owner.name` by `change(true function, *args, **kwargs)`."""
    true = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(true, *args, **kwargs))


def rows_and_columns_swapped_in_rotary(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "rotary_angles", lambda true, *args: (
        true(*args).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    ))


def rotary_pairs_halves_apart(patch: Patch, _: CausalLM) -> None:
    def change(true: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        adjacent = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return true(adjacent, cos, sin)

    wrap(patch, vision, "rotate_pairs", change)


def rotary_frequencies_one_axis_after_the_other(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "rotary_angles", lambda true, *args: (
        true(*args).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    ))


def rotary_turned_backwards(patch: Patch, _: CausalLM) -> None:
    def change(true: Callable[..., Tensor], *args: object) -> Tensor:
        angles = true(*args)
        angles[:, 1::2] *= -1  # of one axis only: turning both back changes no score
        return angles

    wrap(patch, vision, "rotary_angles", change)


def rows_and_columns_swapped_in_the_grid_of_positions(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "resize_positions", lambda true, table, height, width: (
        true(table.transpose(0, 1), height, width)
    ))


def positions_interpolated_between_corners(patch: Patch, _: CausalLM) -> None:
    def change(_: object, table: Tensor, height: int, width: int) -> Tensor:
        planes = table.permute(2, 0, 1)[None]
        resized = functional.interpolate(
            planes, size=(height, width), mode="bilinear", align_corners=True
        )
        return resized[0].permute(1, 2, 0).flatten(0, 1)

    wrap(patch, vision, "resize_positions", change)


def positions_interpolated_with_antialias(patch: Patch, _: CausalLM) -> None:
    def change(_: object, table: Tensor, height: int, width: int) -> Tensor:
        planes = table.permute(2, 0, 1)[None]
        resized = functional.interpolate(
            planes, size=(height, width), mode="bilinear", antialias=True
        )
        return resized[0].permute(1, 2, 0).flatten(0, 1)

    wrap(patch, vision, "resize_positions", change)


def positions_cut_out_instead_of_interpolated(patch: Patch, _: CausalLM) -> None:
    def change(_: object, table: Tensor, height: int, width: int) -> Tensor:
        # The 5 x 7 table repeated until it covers every grid of this test.
        return table.repeat(2, 2, 1)[:height, :width].flatten(0, 1)

    wrap(patch, vision, "resize_positions", change)


def rows_and_columns_swapped_in_the_merge(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "merge_patches", lambda true, x, *args: (
        true(x, *args).unflatten(-1, (2, 2, -1)).transpose(1, 2).flatten(1)
    ))


def channels_of_a_merged_token_interleaved(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "merge_patches", lambda true, x, *args: (
        true(x, *args).unflatten(-1, (4, -1)).transpose(1, 2).flatten(1)
    ))


def colours_in_the_order_blue_green_red(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision.PatchEmbed, "forward", lambda true, self, patches, *args: (
        true(self, patches.flip(1), *args)
    ))


def pixels_of_a_patch_transposed(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision.PatchEmbed, "forward", lambda true, self, patches, *args: (
        true(self, patches.transpose(2, 3), *args)
    ))


def channels_last_in_a_patch(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision.PatchEmbed, "forward", lambda true, self, patches, *args: (
        true(self, patches.permute(0, 2, 3, 1).reshape(patches.shape), *args)
    ))


def tanh_gelu_in_the_projector(patch: Patch, _: CausalLM) -> None:
    gelu(patch, lambda approximate: "tanh")


def exact_gelu_in_the_encoder(patch: Patch, _: CausalLM) -> None:
    gelu(patch, lambda approximate: "none")


def gelu(patch: Patch, approximation: Callable[[str], str]) -> None:
    """Replace the approximation that the modules of the tower ask for."""

    class Functional:
        def __getattr__(self, name: str) -> object:
            return getattr(functional, name)

        def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
            return functional.gelu(x, approximate=approximation(approximate))

    patch.setattr(vision, "functional", Functional())


def attention_across_images(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "image_attention", lambda true, q, k, v, scale, lengths: (
        true(q, k, v, scale, (sum(lengths),))
    ))


def values_and_keys_swapped(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "image_attention", lambda true, q, k, v, *args: true(q, v, k, *args))


def cosines_before_sines_in_the_time_table(patch: Patch, _: CausalLM) -> None:
    wrap(patch, vision, "time_table", lambda true, frames, width, device: (
        true(frames, width, device).roll(width // 2, dims=1)
    ))


def norm_eps(patch: Patch, model: CausalLM, part: str, eps: float) -> None:
    """Set the eps of the norms whose name contains `part`."""
    norms = [m for name, m in model.named_modules() if part in name and hasattr(m, "eps")]
    assert norms
    for norm in norms:
        patch.setattr(norm, "eps", eps)


def encoder_norm_eps(patch: Patch, model: CausalLM) -> None:
    norm_eps(patch, model, "vision.blocks.", 1e-6)


def final_norm_eps(patch: Patch, model: CausalLM) -> None:
    norm_eps(patch, model, "vision.final_layernorm", 1e-6)


def projector_norm_eps(patch: Patch, model: CausalLM) -> None:
    norm_eps(patch, model, "projector.post_norm", 1e-6)


def no_norm_behind_the_projector(patch: Patch, model: CausalLM) -> None:
    assert model.projector is not None
    patch.setattr(model.projector.post_norm, "forward", lambda x: x)


MUTATIONS: dict[Callable[[Patch, CausalLM], None], float] = {
    rows_and_columns_swapped_in_rotary: GROSS,
    rotary_pairs_halves_apart: GROSS,
    rotary_frequencies_one_axis_after_the_other: GROSS,
    rotary_turned_backwards: GROSS,
    rows_and_columns_swapped_in_the_grid_of_positions: GROSS,
    positions_interpolated_between_corners: GROSS,
    positions_interpolated_with_antialias: GROSS,
    positions_cut_out_instead_of_interpolated: GROSS,
    rows_and_columns_swapped_in_the_merge: GROSS,
    channels_of_a_merged_token_interleaved: GROSS,
    colours_in_the_order_blue_green_red: GROSS,
    pixels_of_a_patch_transposed: GROSS,
    channels_last_in_a_patch: GROSS,
    tanh_gelu_in_the_projector: GROSS,
    exact_gelu_in_the_encoder: GROSS,
    attention_across_images: GROSS,
    values_and_keys_swapped: GROSS,
    cosines_before_sines_in_the_time_table: GROSS,
    encoder_norm_eps: FINE,
    final_norm_eps: FINE,
    projector_norm_eps: FINE,
    no_norm_behind_the_projector: GROSS,
}


def test_the_true_features_stay_inside_the_tolerance(
    case: tuple[CausalLM, Prompt, Tensor],
) -> None:
    model, prompt, expected = case
    assert relative_error(features(model, prompt), expected) < FINE


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_mistake_in_the_tower_is_seen(
    mutation: Callable[[Patch, CausalLM], None], case: tuple[CausalLM, Prompt, Tensor],
    monkeypatch: Patch,
) -> None:
    model, prompt, expected = case
    mutation(monkeypatch, model)
    error = relative_error(features(model, prompt), expected)
    print(f"{mutation.__name__}: {error:.1e}")
    assert error > 2 * MUTATIONS[mutation]


def test_images_in_another_order_are_seen(case: tuple[CausalLM, Prompt, Tensor]) -> None:
    model, prompt, expected = case
    first, second, video = prompt.images
    ids = [i for i in prompt.ids if i != prompt.media]
    pads = [prompt.media] * len(expected)  # one run: only the order of the images differs
    swapped = Prompt(pads + ids, prompt.media, (second, first, video))
    found = features(model, swapped)
    assert relative_error(found, expected) > GROSS
    one, two, three = expected.split([6, 3, 2])
    assert relative_error(found, torch.cat([two, one, three])) < FINE


@pytest.mark.parametrize("off", [-1, 1])
def test_an_off_by_one_count_of_image_tokens_is_refused(
    off: int, case: tuple[CausalLM, Prompt, Tensor], monkeypatch: Patch
) -> None:
    model, prompt, _ = case
    true = VisionSpec.num_tokens
    monkeypatch.setattr(VisionSpec, "num_tokens", lambda self, grid: true(self, grid) + off)
    with pytest.raises(DataError, match="image tokens"):
        features(model, prompt)


@pytest.mark.parametrize("off", [-1, 1])
def test_an_off_by_one_place_of_the_image_rows_is_refused(
    off: int, case: tuple[CausalLM, Prompt, Tensor]
) -> None:
    model, prompt, _ = case
    batch = image_batch([prompt])
    assert batch is not None
    shifted = type(batch)(batch.patches, batch.grids, batch.rows + off)
    ctx = ForwardContext.packed([len(prompt.ids)], images=shifted)
    with pytest.raises(DataError, match="placeholder"):
        model(torch.tensor(prompt.ids), ctx)
