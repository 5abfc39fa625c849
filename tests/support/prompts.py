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
        spans: first and one past the last placeholder of each image; empty where every run of
            placeholders is one image.
    """

    ids: list[int]
    media: int | None = None
    images: tuple[Image, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def split(self, wanted: Sequence[int]) -> Iterator[Prompt]:
        """Cut at the places wanted, except those inside an image."""
        spans = self.spans or self._runs()
        inner = [n for n in wanted if 0 < n < len(self.ids)]
        inner = [n for n in inner if not any(begin < n < end for begin, end in spans)]
        images = iter(self.images)
        for begin, end in pairwise([0, *inner, len(self.ids)]):
            here = [(b - begin, e - begin) for b, e in spans if begin <= b < end]
            taken = tuple(next(images) for _ in here)
            yield Prompt(self.ids[begin:end], self.media, taken, tuple(here))

    def labels(self) -> list[tuple[int, int]]:
        """(position, next token) wherever the next token is text."""
        return [(t, n) for t, n in enumerate(self.ids[1:]) if n != self.media]

    def _runs(self) -> list[tuple[int, int]]:
        """Runs of placeholders."""
        marked = [False, *(i == self.media for i in self.ids), False]
        edges = [t for t, (one, two) in enumerate(pairwise(marked)) if one != two]
        return list(zip(edges[0::2], edges[1::2], strict=True))


def image_batch(prompts: Sequence[Prompt]) -> ImageBatch | None:
    """The images of prompts that are packed one behind the other."""
    images = [image for prompt in prompts for image in prompt.images]
    if not images:
        return None
    flat = torch.tensor([i for prompt in prompts for i in prompt.ids])
    rows = (flat == prompts[0].media).nonzero().squeeze(1)
    patches = torch.cat([patches for patches, _ in images])
    return ImageBatch(patches, tuple(grid for _, grid in images), rows)
