"""Images within a budget of tokens: the rule of towers whose images may also be made larger.

    f = P * merge, the side of a token in pixels
    canvas: ceil(H / f) x ceil(W / f) tokens; below the least number of tokens the sides are scaled
            by sqrt(least * f^2 / (H W)) first, above the most the height is the largest that fits
    scale = min(canvas H / H, canvas W / W), at most 1 unless H W < least * f^2

Knows: sizes and preprocessor_config.json. Does not know: pixels (see `images`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.arch.spec import AxialVisionSpec
from trimtab.data.images import Board, Channels, Layout, ProcessorFields

# Statistics of the images that the CLIP models were trained on, which the released processor uses.
_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
_STD: Channels = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
_NOISE = ("default_to_square", "image_processor_type", "patch_expand_factor", "processor_class", "size")


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """How an image becomes patches.

    Args:
        patch_size: P, side of a patch in pixels.
        merge_size: patches along each side of one token.
        least_tokens: a smaller image is made larger.
        most_tokens: a larger image is made smaller.
        mean, std: per channel, of pixels scaled to 0..1.
    """

    patch_size: int = 14
    merge_size: int = 2
    least_tokens: int = 16
    most_tokens: int = 8000
    mean: Channels = _MEAN
    std: Channels = _STD

    @property
    def board(self) -> Board | None:
        """None: transparency is dropped."""
        return None

    @property
    def token_side(self) -> tuple[int, int]:
        """Height and width of one token in pixels."""
        return self.patch_size * self.merge_size, self.patch_size * self.merge_size

    def layout(self, width: int, height: int, max_tokens: int | None = None) -> Layout:
        """Size after resizing, and tokens after padding.

        Args:
            width: of the image, at least 1.
            height: of the image, at least 1.
            max_tokens: a further limit.

        >>> BudgetRule().layout(28, 28)
        Layout(width=112, height=112, across=4, down=4)
        """
        side = self.token_side[0]
        most = self.most_tokens if max_tokens is None else min(self.most_tokens, max_tokens)
        least = min(self.least_tokens, most)
        across, down = math.ceil(width / side), math.ceil(height / side)
        if across * down < least:
            scale = math.sqrt(least * side**2 / (height * width))
            across = math.ceil(math.ceil(width * scale) / side)
            down = math.ceil(math.ceil(height * scale) / side)
        if across * down > most:
            across, down = self._fitted(width, height, most)
        scale = min(down * side / height, across * side / width)
        if height * width >= least * side**2:
            scale = min(1.0, scale)
        return Layout(
            max(1, min(across * side, math.floor(width * scale))),
            max(1, min(down * side, math.floor(height * scale))), across, down,
        )

    def num_tokens(self, width: int, height: int, max_tokens: int | None = None) -> int:
        """Tokens of an image of this size."""
        return self.layout(width, height, max_tokens).num_tokens

    def _fitted(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Tokens across and down at the largest height that keeps the limit."""
        side, best, low, high = self.token_side[0], (1, 1), 1, height
        while low <= high:
            tried = (low + high) // 2
            across = math.ceil(max(1, math.floor(width * tried / height)) / side)
            down = math.ceil(tried / side)
            if across * down <= most:
                best, low = (across, down), tried + 1
            else:
                high = tried - 1
        return best


_RELEASED = BudgetRule()


def read_budget_rule(
    config: Mapping[str, object] | None, vision: AxialVisionSpec, where: str
) -> BudgetRule:
    """The rule of a model: sizes from its architecture, limits from preprocessor_config.json.

    Args:
        config: the parsed file; None where there is none, which leaves the released limits.
        vision: of the architecture.
        where: path of the file, for messages.

    Raises:
        DataError: TT405 for a value that contradicts the architecture or that is not supported.
    """
    fields = ProcessorFields(config or {}, where)
    fields.expect("patch_size", [vision.patch_size])
    fields.expect("merge_size", [vision.merge_size])
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.expect(key, [True])
    fields.expect("resample", [_BICUBIC])
    fields.expect("rescale_factor", [1 / 255])
    rule = BudgetRule(
        vision.patch_size,
        vision.merge_size,
        fields.integer("min_image_tokens", _RELEASED.least_tokens),
        fields.integer("max_image_tokens", _RELEASED.most_tokens),
        fields.channels("image_mean", _RELEASED.mean),
        fields.channels("image_std", _RELEASED.std),
    )
    fields.finish(_NOISE)
    return rule
