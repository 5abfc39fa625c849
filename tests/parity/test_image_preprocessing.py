"""Image preprocessing equals the naive one, pixel by pixel; planted mistakes do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracles import naive_images, naive_k3, random_k3
from tests.oracles.random_tensors import save_checkpoint
from tests.support.compare import relative_error
from trimtab.checkpoint.load import load_model
from trimtab.data import images
from trimtab.data.images import ImagePatches, VisionRule, preprocess, read_rule
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.verify.tolerances import limit

pytestmark = pytest.mark.parity

ROUNDING = 1e-6  # of normalised values in [-1, 1], which are float32
# Sizes below, at and above one patch, one token and the borders between them.
SIZES = [(1, 1), (13, 40), (28, 28), (29, 56), (57, 31), (70, 43)]
# Small limits, so that small images are resized: 20 patches in all, 6 along a side.
SMALL = {**naive_images.MEDIA, "in_patch_limit": 20, "patch_limit_on_one_side": 6}
SMALL_RULE = VisionRule(max_patches=20, max_side_patches=6)

Patch = pytest.MonkeyPatch


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    levels = np.random.default_rng(width * 1000 + height).integers(
        0, 256, (height, width, len(mode)), dtype=np.uint8
    )
    return Image.fromarray(levels, mode if mode == "RGBA" else None)


def difference(found: ImagePatches, image: Image.Image) -> float:
    """Largest difference of normalised values from the naive preprocessing; infinite by shape."""
    patches, grid = naive_images.preprocess(image)
    if found.grid != grid or found.patches.shape != patches.shape:
        return float("inf")
    if found.num_tokens != naive_images.num_tokens(*image.size):
        return float("inf")
    return float(np.abs(found.normalised() - patches).max())


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("size", SIZES)
def test_patches_are_the_naive_ones(size: tuple[int, int], mode: str) -> None:
    image = picture(*size, mode)
    assert difference(preprocess(image, VisionRule()), image) < ROUNDING


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("size", [(90, 70), (200, 40), (30, 190), (84, 84)])
def test_patches_of_resized_images_are_the_naive_ones(
    size: tuple[int, int], mode: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(naive_images, "MEDIA", SMALL)
    image = picture(*size, mode)
    assert naive_images.resized_size(*size) != size
    assert difference(preprocess(image, SMALL_RULE), image) < ROUNDING


def test_token_counts_are_the_naive_ones() -> None:
    """Thousands of sizes, dense where one more pixel is one more token and across the limits."""
    rule, numbers = VisionRule(), np.random.default_rng(0)
    sizes = [(w, h) for w in range(1, 60) for h in range(1, 60)]
    sizes += [tuple(map(int, size)) for size in numbers.integers(1, 12000, (3000, 2))]
    sizes += [(7168 + n, 28) for n in range(-3, 60)] + [(3584 + n, 3584) for n in range(-30, 60)]
    wrong = [s for s in sizes if rule.num_tokens(*s) != naive_images.num_tokens(*s)]
    assert not wrong
    assert [s for s in sizes if rule.resized(*s) != naive_images.resized_size(*s)] == []


@pytest.mark.parametrize(
    ("size", "tokens"), [((1500, 500), 972), ((2875, 1500), 5562), ((1861, 7041), 16817)]
)
def test_golden_token_counts_of_real_images(size: tuple[int, int], tokens: int) -> None:
    """The golden counts hold for what is cut, not only for what is announced."""
    found = preprocess(Image.new("RGB", size), VisionRule())
    assert found.num_tokens == tokens
    assert len(found.patches) == 4 * tokens
    assert found.grid == naive_images.grid_of(*size)


def changed(patch: Patch, change: Callable[[np.ndarray, tuple[int, int, int]], np.ndarray]) -> None:
    """Change the patches behind `preprocess`."""
    true = images.ImagePatches

    def mutated(patches: np.ndarray, grid: tuple[int, int, int], *rest: Any) -> ImagePatches:
        return true(change(patches, grid), grid, *rest)

    patch.setattr(images, "ImagePatches", mutated)


def colours_in_the_order_blue_green_red(patch: Patch) -> None:
    changed(patch, lambda patches, _: patches[:, ::-1])


def patches_column_by_column(patch: Patch) -> None:
    changed(patch, lambda patches, grid: (
        patches.reshape(grid[1], grid[2], *patches.shape[1:]).swapaxes(0, 1).reshape(patches.shape)
    ))


def pixels_of_a_patch_transposed(patch: Patch) -> None:
    changed(patch, lambda patches, _: patches.swapaxes(2, 3))


def one_token_too_many(patch: Patch) -> None:
    true = images.ImagePatches
    patch.setattr(images, "ImagePatches", lambda patches, grid, tokens, *rest: (
        true(patches, grid, tokens + 1, *rest)
    ))


def one_token_too_few(patch: Patch) -> None:
    true = images.ImagePatches
    patch.setattr(images, "ImagePatches", lambda patches, grid, tokens, *rest: (
        true(patches, grid, tokens - 1, *rest)
    ))


def padding_with_gray(patch: Patch) -> None:
    class Numpy:
        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        def zeros(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
            return np.full(shape, 127, dtype)

    patch.setattr(images, "np", Numpy())


@pytest.mark.parametrize("mutation", [
    colours_in_the_order_blue_green_red, patches_column_by_column, pixels_of_a_patch_transposed,
    one_token_too_many, one_token_too_few, padding_with_gray,
], ids=lambda m: m.__name__)
def test_a_mistake_in_preprocessing_is_seen(
    mutation: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    image = picture(57, 31)
    mutation(monkeypatch)
    assert difference(preprocess(image, VisionRule()), image) > 0.1


@pytest.mark.parametrize(
    ("name", "board"),
    [("gray on the top left", (8, 180, 255)), ("squares of another size", (7, 255, 180)),
     ("gray of another level", (8, 255, 181))],
)
def test_a_wrong_board_is_seen(name: str, board: tuple[int, int, int]) -> None:
    image = Image.new("RGBA", (28, 28), (10, 20, 30, 0))
    assert difference(preprocess(image, VisionRule(board=board)), image) > 0.001, name
    assert difference(preprocess(image, VisionRule()), image) < ROUNDING


def test_another_resampling_is_seen(monkeypatch: Patch) -> None:
    monkeypatch.setattr(naive_images, "MEDIA", SMALL)
    image = picture(90, 70)
    monkeypatch.setattr(
        Image.Image, "resize", _resize_with(Image.Image.resize, Image.Resampling.BILINEAR)
    )
    found = preprocess(image, SMALL_RULE)
    monkeypatch.undo()
    monkeypatch.setattr(naive_images, "MEDIA", SMALL)
    assert difference(found, image) > 0.01


def _resize_with(true: Callable[..., Image.Image], filter_: int) -> Callable[..., Image.Image]:
    return lambda self, size, *_: true(self, size, filter_)


def test_a_picture_gives_the_naive_logits(tmp_path: Path) -> None:
    """From pixels to logits: our preprocessing and model against the naive ones."""
    config = random_k3.tiny_config(True, vision=True, layers=4, experts=4, top_k=2)
    tensors = random_k3.random_checkpoint(config, seed=7)
    save_checkpoint(tmp_path, config, tensors)
    model, arch = load_model(tmp_path, base_dtype="fp32", compute_dtype=torch.float32)
    image = picture(57, 31, "RGBA")
    rule = read_rule({"media_proc_cfg": naive_images.MEDIA}, arch.vision, "preprocessor")
    found = preprocess(image, rule)
    ids = [*range(5), *[arch.image_token_id] * found.num_tokens, *range(9)]
    rows = range(5, 5 + found.num_tokens)
    batch = ImageBatch.join([found.normalised()], [found.grid], rows)
    with torch.no_grad():
        ctx = ForwardContext.packed([len(ids)], images=batch)
        logits = model.logits(model(torch.tensor(ids), ctx))
    patches, grid = naive_images.preprocess(image)
    want = naive_k3.logits(config, tensors, ids, [(torch.from_numpy(patches), grid)])
    assert relative_error(logits, want) < limit("model.logits.float32")
