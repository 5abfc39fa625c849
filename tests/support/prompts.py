"""Prompts of text and images, and the batches that the model takes for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tests.oracles.naive_vision import Image
from trimtab.models.context import ImageBatch


@dataclass(frozen=True)
class Prompt:
    """Token ids with the images of their placeholders, which text keeps apart.

    Args:
        ids: tokens, placeholders included.
        media: the placeholder id; None for a model without images.
        images: patches and grids, in order.
    """

    ids: list[int]
    media: int | None = None
    images: tuple[Image, ...] = ()

    def split(self, wanted: Sequence[int]) -> Iterator[Prompt]:
        """Cut at the places wanted, except those inside an image."""
        inner = [n for n in wanted if 0 < n < len(self.ids) and not self._inside_image(n)]
        images = iter(self.images)
        for begin, end in pairwise([0, *inner, len(self.ids)]):
            ids = self.ids[begin:end]
            starts = [t for t in range(begin, end) if self._starts_image(t)]
            yield Prompt(ids, self.media, tuple(next(images) for _ in starts))

    def labels(self) -> list[tuple[int, int]]:
        """(position, next token) wherever the next token is text."""
        return [(t, n) for t, n in enumerate(self.ids[1:]) if n != self.media]

    def _inside_image(self, t: int) -> bool:
        return self.ids[t] == self.media and self.ids[t - 1] == self.media

    def _starts_image(self, t: int) -> bool:
        return self.ids[t] == self.media and (t == 0 or self.ids[t - 1] != self.media)


def image_batch(prompts: Sequence[Prompt]) -> ImageBatch | None:
    """The images of prompts that are packed one behind the other."""
    images = [image for prompt in prompts for image in prompt.images]
    if not images:
        return None
    flat = torch.tensor([i for prompt in prompts for i in prompt.ids])
    rows = (flat == prompts[0].media).nonzero().squeeze(1)
    patches = torch.cat([patches for patches, _ in images])
    return ImageBatch(patches, tuple(grid for _, grid in images), rows)
