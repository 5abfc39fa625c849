"""Naive image preprocessing of K3, pixel by pixel; PIL does nothing but the bicubic resize.

Follows K3 sheet 4, "Preprocessing" and "Token framing". Blending with the board is exact rational
arithmetic, cut down to whole levels: the sheet says "float blend, truncate", and where a float
product falls a rounding error short of a whole level, another implementation may be one lower.
"""

import math

import numpy as np
from PIL import Image

MEDIA = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "transparent_bg_config": {"mode": "chessboard", "square": 8, "white": 255, "gray": 180},
    "transparent_bg_fill_stage": "after_resize",
}

Pixels = list[list[tuple[int, int, int]]]


def resized_size(width: int, height: int) -> tuple[int, int]:
    """Return (W', H'): shrunk to the patch limits, never enlarged."""
    patch, side = MEDIA["patch_size"], MEDIA["patch_limit_on_one_side"] * MEDIA["patch_size"]
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(
        1.0, math.sqrt(MEDIA["in_patch_limit"] / patches), side / width, side / height
    )
    return min(side, max(1, int(width * scale))), min(side, max(1, int(height * scale)))


def padded_size(width: int, height: int) -> tuple[int, int]:
    """Return the size after resizing, rounded up to whole merge windows."""
    window = MEDIA["patch_size"] * MEDIA["merge_kernel_size"]
    new_width, new_height = resized_size(width, height)
    return math.ceil(new_width / window) * window, math.ceil(new_height / window) * window


def num_tokens(width: int, height: int) -> int:
    """Return how many placeholder tokens an image of this original size takes."""
    window = MEDIA["patch_size"] * MEDIA["merge_kernel_size"]
    padded = padded_size(width, height)
    return (padded[0] // window) * (padded[1] // window)


def grid_of(width: int, height: int) -> tuple[int, int, int]:
    """Return (1, rows, columns) of patches."""
    padded = padded_size(width, height)
    return 1, padded[1] // MEDIA["patch_size"], padded[0] // MEDIA["patch_size"]


def framing(width: int, height: int) -> list[str]:
    """Return the prompt pieces of one image; the size is the original one, in pixels."""
    pads = ["<|media_pad|>"] * num_tokens(width, height)
    head = ["<|media_begin|>", f"image {width}x{height}", "<|media_content|>"]
    return [*head, *pads, "<|media_end|>"]


def preprocess(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return patches [N, 3, 14, 14] float64 and the grid of an RGB or RGBA image."""
    if image.mode not in ("RGB", "RGBA"):
        raise ValueError(f"mode ({image.mode}): the sheet describes RGB and RGBA only")
    grid = grid_of(*image.size)
    small = image.resize(resized_size(*image.size), Image.Resampling.BICUBIC)
    pixels = padded(opaque(small), *padded_size(*image.size))
    side = MEDIA["patch_size"]
    corners = [(row * side, column * side) for row in range(grid[1]) for column in range(grid[2])]
    return np.array([patch_at(pixels, top, left) for top, left in corners]), grid


def opaque(image: Image.Image) -> Pixels:
    """Return rows of (r, g, b), transparent pixels blended with the board."""
    width, height = image.size
    rows: Pixels = []
    for y in range(height):
        row = []
        for x in range(width):
            r, g, b, *rest = image.getpixel((x, y))
            alpha, back = rest[0] if rest else 255, board_at(x, y)
            row.append(tuple((v * alpha + back * (255 - alpha)) // 255 for v in (r, g, b)))
        rows.append(row)
    return rows


def board_at(x: int, y: int) -> int:
    """Return the level of the board: white on top-left, gray where (y//8 + x//8) is odd."""
    board = MEDIA["transparent_bg_config"]
    return board["gray"] if (y // board["square"] + x // board["square"]) % 2 else board["white"]


def padded(pixels: Pixels, width: int, height: int) -> Pixels:
    """Add black columns on the right and black rows below."""
    black = (0, 0, 0)
    rows = [[*row, *[black] * (width - len(row))] for row in pixels]
    return [*rows, *[[black] * width for _ in range(height - len(rows))]]


def patch_at(pixels: Pixels, top: int, left: int) -> list[list[list[float]]]:
    """Return one normalised patch as [channel][y][x]."""
    side = MEDIA["patch_size"]
    return [
        [
            [normalised(pixels[top + y][left + x][channel], channel) for x in range(side)]
            for y in range(side)
        ]
        for channel in range(3)
    ]


def normalised(level: int, channel: int) -> float:
    """(v / 255 - mean) / std."""
    return (level / 255 - MEDIA["image_mean"][channel]) / MEDIA["image_std"][channel]
