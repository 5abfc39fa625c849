"""Preprocessing: sizes, background, padding and the order of pixels in patches."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.oracles import naive_images
from tests.unit.data.pictures import picture
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import VisionSpec
from trimtab.config.data import ImageSection
from trimtab.data.images import ImagePatches, VisionRule, preprocess, read_rule
from trimtab.data.prompt import load_image_processor
from trimtab.errors import DataError

RULE = VisionRule()


def spec() -> VisionSpec:
    vision = load_arch(preset_config("kimi-k3"), "kimi-k3").vision
    assert vision is not None
    return vision


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((1500, 500), 972), ((2875, 1500), 5562), ((1861, 7041), 16817), ((28, 28), 1),
     ((1, 1), 1), ((29, 28), 2), ((112, 28), 4), ((28, 112), 4)],
)  # fmt: skip
def test_golden_token_counts(size: tuple[int, int], tokens: int) -> None:
    assert RULE.num_tokens(*size) == tokens


def test_grid_and_tokens_of_a_preprocessed_image_agree_with_the_count() -> None:
    image = preprocess(picture(150, 61), RULE)
    assert image.grid == (1, 6, 12) and image.patches.shape == (72, 3, 14, 14)
    assert image.num_tokens == 18 == RULE.num_tokens(150, 61) == spec().num_tokens(image.grid)
    assert (image.width, image.height) == (150, 61)


@pytest.mark.parametrize(("size", "mode"), [((28, 28), "RGB"), ((57, 30), "RGBA"),
                                             ((15, 43), "RGB"), ((56, 28), "RGBA")])  # fmt: skip
def test_pixels_equal_those_of_a_naive_implementation(size: tuple[int, int], mode: str) -> None:
    image = picture(*size, mode, seed=3)
    patches, grid = naive_images.preprocess(image)
    got = preprocess(image, RULE)
    assert got.grid == grid
    assert np.abs(got.normalised() - patches).max() < 1e-6


def test_large_image_is_resized_like_the_naive_one() -> None:
    rule = VisionRule(max_side_patches=4)
    got = preprocess(picture(120, 50), rule)
    want = picture(120, 50).resize(rule.resized(120, 50), Image.Resampling.BICUBIC)
    assert want.size == (56, 23) and got.grid == (1, 2, 4)
    assert np.array_equal(got.patches[0].transpose(1, 2, 0), np.asarray(want)[:14, :14])


def test_patches_run_along_rows_and_channels_come_first() -> None:
    image = Image.new("RGB", (56, 28), (1, 2, 3))
    image.putpixel((20, 5), (9, 9, 9))  # second patch of the first row
    patches = preprocess(image, RULE).patches
    assert patches[0, :, 0, 0].tolist() == [1, 2, 3]
    assert np.argwhere(patches[:, 0] == 9).tolist() == [[1, 5, 6]]


def test_padding_is_black_on_the_right_and_below() -> None:
    image = preprocess(Image.new("RGB", (30, 20), (255, 255, 255)), RULE)
    values = image.normalised()
    assert image.grid == (1, 2, 4)
    assert (values[0] == 1).all() and (values[3] == -1).all()
    assert (values[2, :, :, 2:] == -1).all() and (values[2, :, :, :2] == 1).all()
    assert (values[4, :, 6:] == -1).all() and (values[4, :, :6] == 1).all()


def test_transparent_pixels_show_a_chessboard_white_at_the_top_left() -> None:
    patches = preprocess(Image.new("RGBA", (28, 28), (0, 0, 0, 0)), RULE).patches
    board = patches.reshape(2, 2, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, 28, 28)
    assert board[:, 0, 0].tolist() == [255] * 3 and board[:, 0, 8].tolist() == [180] * 3
    assert board[0, 8, 8] == 255 and board[0, 7, 7] == 255 and board[0, 8, 0] == 180


def test_an_image_is_never_enlarged() -> None:
    assert RULE.resized(5, 3) == (5, 3)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 3000))
def test_a_limit_of_tokens_is_kept_and_used(width: int, height: int, limit: int) -> None:
    new = RULE.resized(width, height, limit)
    assert 1 <= new[0] <= min(width, 7168) and 1 <= new[1] <= min(height, 7168)
    assert math.ceil(new[0] / 28) * math.ceil(new[1] / 28) <= limit
    if RULE.num_tokens(width, height) <= limit:
        assert new == RULE.resized(width, height)


def test_rule_comes_from_the_released_file() -> None:
    assert read_rule({"media_proc_cfg": naive_images.MEDIA}, spec(), "x") == RULE
    limits = {**naive_images.MEDIA, "in_patch_limit": 256, "image_mean": [0.1, 0.2, 0.3]}
    rule = read_rule({"media_proc_cfg": {**limits, "sample_fps": 8.0}}, spec(), "x")
    assert rule.max_patches == 256 and rule.mean == (0.1, 0.2, 0.3)
    assert read_rule(None, spec(), "x") == RULE


@pytest.mark.parametrize(
    ("key", "value"),
    [("patch_size", 16), ("merge_kernel_size", [1, 1]), ("fixed_output_tokens", 64),
     ("transparent_bg_fill_stage", "before_resize"), ("in_patch_limit", 0), ("image_std", [0, 1, 1]),
     ("image_mean", 0.5), ("transparent_bg_config", {"mode": "solid"}), ("sharpen", True)],
)  # fmt: skip
def test_a_value_that_changes_pixels_in_an_unknown_way_is_refused(key: str, value: object) -> None:
    with pytest.raises(DataError, match=key) as caught:
        read_rule({"media_proc_cfg": {**naive_images.MEDIA, key: value}}, spec(), "p.json")
    assert caught.value.code == "TT405"


def test_normalised_uses_mean_and_deviation_per_channel() -> None:
    patches = np.full((1, 3, 14, 14), 255, np.uint8)
    image = ImagePatches(patches, (1, 1, 1), 1, 14, 14, (0.0, 0.5, 1.0), (1.0, 0.25, 0.5))
    assert image.normalised()[0, :, 0, 0].tolist() == [1.0, 2.0, 0.0]


def test_processor_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    config = preset_config("k3.1-tiny")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"media_proc_cfg": {**naive_images.MEDIA, "in_patch_limit": 64}})
    )
    processor = load_image_processor(tmp_path, ImageSection(max_tokens=9))
    assert processor is not None and processor.token_id == 267
    assert (processor.rule.max_patches, processor.limits.max_tokens) == (64, 9)
    (tmp_path / "config.json").write_text(json.dumps(preset_config("kimi-linear-tiny")))
    assert load_image_processor(tmp_path) is None
    assert load_image_processor(tmp_path / "nothing") is None
