"""The naive image preprocessing: golden counts and what each step must do."""

import numpy as np
import pytest
from PIL import Image

from tests.oracles import naive_images


@pytest.mark.parametrize(
    ("size", "tokens"), [((1500, 500), 972), ((2875, 1500), 5562), ((1861, 7041), 16817)]
)
def test_golden_token_counts(size: tuple[int, int], tokens: int) -> None:
    assert naive_images.num_tokens(*size) == tokens


def test_a_large_image_shrinks_and_a_small_one_never_grows() -> None:
    assert naive_images.resized_size(1861, 7041) == (1850, 7002)
    assert naive_images.resized_size(1, 1) == (1, 1)
    assert naive_images.resized_size(20000, 10) == (7168, 3)
    # int(100000 * (7168 / 100000)) in float64: the product lies just below 7168.
    assert naive_images.resized_size(100000, 10) == (7167, 1)
    assert naive_images.grid_of(1, 1) == (1, 2, 2)
    assert naive_images.grid_of(29, 28) == (1, 2, 4)


def test_framing_carries_the_original_size() -> None:
    assert naive_images.framing(29, 28) == [
        "<|media_begin|>", "image 29x28", "<|media_content|>",
        "<|media_pad|>", "<|media_pad|>", "<|media_end|>",
    ]


def test_patches_are_row_major_and_channels_first() -> None:
    image = Image.new("RGB", (42, 28))
    levels = {(x, y): (10 * x + y, 100, 200 + y) for x in range(3) for y in range(2)}
    for (x, y), level in levels.items():
        image.paste(level, (14 * x, 14 * y, 14 * x + 14, 14 * y + 14))
    patches, grid = naive_images.preprocess(image)
    assert grid == (1, 2, 4)
    assert patches.shape == (8, 3, 14, 14)
    for (x, y), level in levels.items():
        for channel in range(3):
            want = (level[channel] / 255 - 0.5) / 0.5
            assert (patches[4 * y + x, channel] == want).all()
    assert (patches[[3, 7]] == -1).all()  # the padded columns


def test_transparent_pixels_show_the_board() -> None:
    patches, _ = naive_images.preprocess(Image.new("RGBA", (28, 28), (7, 7, 7, 0)))
    levels = np.round((patches[:, 0] * 0.5 + 0.5) * 255).reshape(2, 2, 14, 14)
    picture = levels.transpose(0, 2, 1, 3).reshape(28, 28)
    assert (picture[:8, :8] == 255).all()
    assert (picture[:8, 8:16] == 180).all()
    assert (picture[8:16, :8] == 180).all()
    assert (picture[8:16, 8:16] == 255).all()
    assert (picture[24:, 24:] == 255).all()


def test_blending_is_cut_down_to_whole_levels() -> None:
    half = naive_images.opaque(Image.new("RGBA", (16, 1), (101, 0, 255, 128)))
    # (101 * 128 + 255 * 127) / 255 = 177.7; (0 + 255 * 127) / 255 = 127; all white = 255
    assert half[0][0] == (177, 127, 255)
    # on gray: (101 * 128 + 180 * 127) / 255 = 140.3; 180 * 127 / 255 = 89.6; 217.6
    assert half[0][8] == (140, 89, 217)
