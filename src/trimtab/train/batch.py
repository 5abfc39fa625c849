"""Micro-batches: packs joined into the flat tokens of one forward.

Knows: how packs and their images are joined. Does not know: models, optimizers.

Shape letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.config.data import Role
from trimtab.data.images import ImagePatches
from trimtab.data.packing import IGNORED, Pack
from trimtab.models.context import ImageBatch
from trimtab.train.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packs joined into one flat sequence of tokens.

    Args:
        input_ids: [T], int64.
        labels: [T], int64, the token to predict at each position; IGNORED where unsupervised.
        lengths: documents, summing to T.
        valid: [T], bool; False on pads.
        token_ids: [T], int64, position in the global batch: what dropout masks are drawn from, so
            that they do not depend on the accumulation.
        images: of all packs, None where there are none.
        general: [T], bool; True on records of the general source.
    """

    input_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    valid: Tensor
    token_ids: Tensor
    images: ImageBatch | None
    general: Tensor

    def rows(self) -> dict[Role, Tensor]:
        """Positions of the supervised tokens by the role of their source; roles without any are
        left out.
        """
        supervised = self.labels != IGNORED
        found: dict[Role, Tensor] = {
            "domain": (supervised & ~self.general).nonzero().squeeze(1),
            "general": (supervised & self.general).nonzero().squeeze(1),
        }
        return {role: rows for role, rows in found.items() if len(rows)}


def image_batch(
    images: Sequence[ImagePatches], rows: Sequence[int], device: torch.device | str = "cpu"
) -> ImageBatch | None:
    """Images as the model takes them.

    Args:
        images: in the order of their tokens.
        rows: positions of the placeholder tokens in the flat pack.
        device: where the tensors go.
    """
    grids = [image.grid for image in images]
    return ImageBatch.join([image.normalised() for image in images], grids, rows, device)


def on_device(images: ImageBatch | None, device: torch.device) -> ImageBatch | None:
    """The same images on a device."""
    if images is None:
        return None
    return ImageBatch(images.patches.to(device), images.grids, images.rows.to(device))


def _images(packs: Sequence[Pack]) -> ImageBatch | None:
    """Images of packs laid end to end."""
    rows: list[int] = []
    begin = 0
    for pack in packs:
        rows.extend(int(row) + begin for row in pack.image_rows)
        begin += len(pack.input_ids)
    return image_batch([image for pack in packs for image in pack.images], rows)


def micro_batches(packs: Sequence[Pack], plan: BatchPlan) -> Iterator[MicroBatch]:
    """Join the packs of one global batch, `plan.packs_per_micro_batch` at a time."""
    for start in range(0, len(packs), plan.packs_per_micro_batch):
        members = packs[start : start + plan.packs_per_micro_batch]
        ids = torch.cat([torch.as_tensor(p.input_ids, dtype=torch.int64) for p in members])
        first = start * plan.max_seq_len
        yield MicroBatch(
            input_ids=ids,
            labels=torch.cat([torch.as_tensor(p.labels, dtype=torch.int64) for p in members]),
            lengths=tuple(
                int(end) - int(begin)
                for p in members
                for begin, end in zip(p.cu_seqlens[:-1], p.cu_seqlens[1:], strict=True)
            ),
            valid=torch.cat([torch.as_tensor(p.valid, dtype=torch.bool) for p in members]),
            token_ids=torch.arange(first, first + ids.numel()),
            images=_images(members),
            general=torch.tensor(
                [name.startswith("general") for p in members for name in p.sources]
            ).repeat_interleave(torch.tensor([n for p in members for n in p.lengths])),
        )
