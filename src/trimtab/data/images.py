"""Images to normalised patches, as the released image processor of K3 makes them.

Knows: pixels, sizes, preprocessor_config.json. Does not know: records, tokens, torch.

    scale = min(1, sqrt(max_patches / (max(1, W // P) * max(1, H // P))), max_side * P / W, ... / H)
    tokens = ceil(W' / (P * merge)) * ceil(H' / (P * merge))

An image is made smaller, never larger; its transparent parts show a chessboard; black pixels fill
it up to whole tokens on the right and below. The orientation tag of a photograph is not applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trimtab.arch.spec import VisionSpec
from trimtab.errors import DataError

PREPROCESSOR = "preprocessor_config.json"
_BISECTIONS = 40
# Keys of media_proc_cfg that steer video or name a class.
_VIDEO = re.compile("video|frame|fps|temporal|timestamp|config_type")
_BOARD_WORDS = ("square", "white", "gray")
Channels = tuple[float, float, float]
Board = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """How an image lies on its patches.

    Args:
        width, height: pixels after resizing, before padding.
        across, down: tokens.
    """

    width: int
    height: int
    across: int
    down: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the image."""
        return self.across * self.down


class ImageRule(Protocol):
    """How the images of a model become patches."""

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""

    @property
    def token_side(self) -> tuple[int, int]:
        """Height and width of one token in pixels."""

    @property
    def mean(self) -> Channels:
        """Of pixels scaled to 0..1."""

    @property
    def std(self) -> Channels:
        """Of pixels scaled to 0..1."""

    @property
    def board(self) -> Board | None:
        """Chessboard behind transparent parts; None where transparency is dropped."""

    def layout(self, width: int, height: int, max_tokens: int | None = None) -> Layout:
        """Size after resizing and tokens of an image of this size."""

    def num_tokens(self, width: int, height: int, max_tokens: int | None = None) -> int:
        """Tokens of an image of this size."""


@dataclass(frozen=True, slots=True)
class VisionRule:
    """How an image becomes patches.

    Args:
        patch_size: P, side of a patch in pixels.
        merge_height, merge_width: patches that become one token.
        max_patches: an image with more is made smaller.
        max_side_patches: greatest number of patches along one side.
        mean, std: per channel, of pixels scaled to 0..1.
        board: side of a chessboard square in pixels, level of its white and of its gray.
    """

    patch_size: int = 14
    merge_height: int = 2
    merge_width: int = 2
    max_patches: int = 65536
    max_side_patches: int = 512
    mean: Channels = (0.5, 0.5, 0.5)
    std: Channels = (0.5, 0.5, 0.5)
    board: Board = (8, 255, 180)

    def resized(self, width: int, height: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Width and height in pixels after resizing, before padding.

        Args:
            width: of the image, at least 1.
            height: of the image, at least 1.
            max_tokens: a further limit; the largest size that keeps it is taken.

        >>> VisionRule().resized(10000, 5)
        (7168, 3)
        """
        p, side = self.patch_size, self.max_side_patches * self.patch_size
        patches = max(1, width // p) * max(1, height // p)
        scale = min(1.0, math.sqrt(self.max_patches / patches), side / width, side / height)
        size = self._scaled(width, height, scale)
        if max_tokens is None or self._tokens(*size) <= max_tokens:
            return size
        low, high = 0.0, scale
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            fits = self._tokens(*self._scaled(width, height, middle)) <= max_tokens
            low, high = (middle, high) if fits else (low, middle)
        return self._scaled(width, height, low)

    @property
    def token_side(self) -> tuple[int, int]:
        """Height and width of one token in pixels."""
        return self.patch_size * self.merge_height, self.patch_size * self.merge_width

    def layout(self, width: int, height: int, max_tokens: int | None = None) -> Layout:
        """Size after resizing and tokens of an image of this size."""
        size, (high, wide) = self.resized(width, height, max_tokens), self.token_side
        return Layout(*size, math.ceil(size[0] / wide), math.ceil(size[1] / high))

    def num_tokens(self, width: int, height: int, max_tokens: int | None = None) -> int:
        """Tokens of an image of this size.

        >>> rule = VisionRule()
        >>> rule.num_tokens(1500, 500), rule.num_tokens(2875, 1500), rule.num_tokens(1861, 7041)
        (972, 5562, 16817)
        """
        return self._tokens(*self.resized(width, height, max_tokens))

    def _scaled(self, width: int, height: int, scale: float) -> tuple[int, int]:
        side = self.max_side_patches * self.patch_size
        return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)

    def _tokens(self, width: int, height: int) -> int:
        across = math.ceil(width / (self.patch_size * self.merge_width))
        return across * math.ceil(height / (self.patch_size * self.merge_height))


_RELEASED = VisionRule()


@dataclass(frozen=True, slots=True)
class ImagePatches:
    """One preprocessed image.

    Args:
        patches: uint8 [N, 3, P, P], row by row; `normalised` is what the tower takes.
        grid: frames (1), rows and columns of patches; N is their product.
        num_tokens: tokens it takes in the prompt.
        width, height: of the original, in pixels, as the prompt states them.
        mean, std: of the rule.
    """

    patches: NDArray[np.uint8]
    grid: tuple[int, int, int]
    num_tokens: int
    width: int
    height: int
    mean: Channels = (0.5, 0.5, 0.5)
    std: Channels = (0.5, 0.5, 0.5)

    def normalised(self) -> NDArray[np.float32]:
        """The patches as (level / 255 - mean) / std, float32 [N, 3, P, P]."""
        mean = np.asarray(self.mean, np.float32)[:, None, None]
        std = np.asarray(self.std, np.float32)[:, None, None]
        return (self.patches.astype(np.float32) / np.float32(255) - mean) / std


def preprocess(
    image: Image.Image, rule: ImageRule, max_tokens: int | None = None
) -> ImagePatches:
    """Resize, fill the background, pad and cut into patches.

    Args:
        image: mode RGB, or RGBA where parts are transparent.
        rule: of the model.
        max_tokens: a limit of the recipe beside the model's own.
    """
    width, height = image.size
    layout = rule.layout(width, height, max_tokens)
    size = (layout.width, layout.height)
    if rule.board is None:
        image = image.convert("RGB")
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.uint8)
    if rule.board is not None and pixels.shape[-1] == 4:
        pixels = _on_board(pixels, rule.board)
    p, (token_y, token_x) = rule.patch_size, rule.token_side
    padded = np.zeros((layout.down * token_y, layout.across * token_x, 3), np.uint8)
    padded[: size[1], : size[0]] = pixels
    grid = (1, padded.shape[0] // p, padded.shape[1] // p)
    cut = padded.reshape(grid[1], p, grid[2], p, 3).transpose(0, 2, 4, 1, 3)
    patches = np.ascontiguousarray(cut.reshape(-1, 3, p, p))
    return ImagePatches(patches, grid, layout.num_tokens, width, height, rule.mean, rule.std)


def _on_board(pixels: NDArray[np.uint8], board: Board) -> NDArray[np.uint8]:
    """Blend RGBA [H, W, 4] over a chessboard, white at the top left, and cut to whole levels.

    Whole-number arithmetic, so that a level that is a whole number is not cut to the one below.
    """
    square, white, gray = board
    y, x = np.indices(pixels.shape[:2])
    odd = (y // square + x // square) % 2 == 1
    back = np.where(odd, gray, white).astype(np.uint32)[..., None]
    alpha = pixels[..., 3:].astype(np.uint32)
    blended = (pixels[..., :3] * alpha + back * (255 - alpha)) // 255
    return blended.astype(np.uint8)


def read_rule(config: Mapping[str, object] | None, vision: VisionSpec, where: str) -> VisionRule:
    """The rule of a model: sizes from its architecture, limits from preprocessor_config.json.

    Args:
        config: the parsed file; None where there is none, which leaves the released limits.
        vision: of the architecture.
        where: path of the file, for messages.

    Raises:
        DataError: TT405 for a value that contradicts the architecture or that is not supported.
    """
    given = (config or {}).get("media_proc_cfg", {})
    if not isinstance(given, Mapping):
        raise DataError("TT405", f"{where}: media_proc_cfg", "must be an object")
    fields = ProcessorFields(given, f"{where}: media_proc_cfg")
    merge = [vision.merge_height, vision.merge_width]
    one = merge[0] if merge[0] == merge[1] else merge
    fields.expect("patch_size", [vision.patch_size])
    fields.expect("merge_kernel_size", [merge, one])
    fields.expect("fixed_output_tokens", [None])
    fields.expect("transparent_bg_fill_stage", ["after_resize"])
    rule = VisionRule(
        vision.patch_size,
        vision.merge_height,
        vision.merge_width,
        max_patches=fields.integer("in_patch_limit", _RELEASED.max_patches),
        max_side_patches=fields.integer("patch_limit_on_one_side", _RELEASED.max_side_patches),
        mean=fields.channels("image_mean", _RELEASED.mean),
        std=fields.channels("image_std", _RELEASED.std),
        board=fields.board("transparent_bg_config", _RELEASED.board),
    )
    fields.finish()
    return rule


class ProcessorFields:
    """Reads the settings of a processor; a key that nothing asks for is refused.

    Args:
        values: the settings.
        where: path of the object, for messages.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where
        self._left = {key for key in values if not _VIDEO.search(key)}

    def _get(self, key: str, default: object) -> object:
        self._left.discard(key)
        return self._values.get(key, default)

    def _fail(self, key: str, rule: str) -> DataError:
        return DataError("TT405", f"{self._where}.{key}", rule, value=self._values.get(key))

    def expect(self, key: str, allowed: list[object]) -> None:
        """Require one of these values; an absent key passes."""
        if self._get(key, allowed[0]) not in allowed:
            raise self._fail(key, f"must be {allowed[0]}; nothing else is supported for this model")

    def integer(self, key: str, default: int) -> int:
        """A whole number of at least 1."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._fail(key, "must be a whole number of at least 1")
        return value

    def channels(self, key: str, default: Channels) -> Channels:
        """Three numbers."""
        value = self._get(key, list(default))
        if not isinstance(value, list) or len(value) != 3:
            raise self._fail(key, "must be three numbers")
        if not all(isinstance(v, int | float) for v in value) or (key.endswith("std") and 0 in value):
            raise self._fail(key, "must be three numbers, for a deviation not 0")
        return float(value[0]), float(value[1]), float(value[2])

    def board(self, key: str, default: Board) -> Board:
        """Side of a square, and two levels."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._fail(key, "must be an object")
        found = dict(zip(_BOARD_WORDS, default, strict=True))
        for name, item in value.items():
            word = next((w for w in _BOARD_WORDS if w in name), None)
            if word is not None and type(item) is int and (word == "square") <= item <= 255:
                found[word] = item
            elif item not in ("chessboard", "white"):
                rule = "only a chessboard, white at the top left, is supported"
                raise self._fail(f"{key}.{name}", rule)
        return found["square"], found["white"], found["gray"]

    def finish(self, noise: Collection[str] = ()) -> None:
        """Refuse what nothing asked for, but for keys known to have no effect."""
        left = sorted(self._left - set(noise))
        if left:
            raise self._fail(left[0], "is not known and may change the pixels")
