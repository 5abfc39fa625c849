"""Logits of short token sequences, one at a time.

Knows: how to run a model on an unpacked sequence. Does not know: files, what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.arch.spec import ArchSpec
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.models.tape import ChoiceTape


@torch.no_grad()
def sequence_logits(
    model: CausalLM, ids: Sequence[int], tape: ChoiceTape | None = None,
    images: ImageBatch | None = None,
) -> Tensor:
    """[T, W] for T token ids; `tape` records or forces routing and selection.

    Raises:
        RuntimeError: a forced tape has choices of layers that this model lacks.
    """
    device = model.embed.weight.device
    tokens = torch.tensor(ids, dtype=torch.int64, device=device)
    context = ForwardContext.packed([len(ids)], device, tape=tape, images=images)
    hidden: Tensor = model(tokens, context)
    if tape is not None and tape.mode == "force":
        tape.check_all_used()
    return model.logits(hidden)


def probe_sequences(vocab_size: int, count: int = 3, length: int = 48) -> list[list[int]]:
    """Fixed pseudo-random token sequences for checks that need any text at all."""
    draw = torch.Generator().manual_seed(20)
    ids: list[list[int]] = torch.randint(vocab_size, (count, length), generator=draw).tolist()
    return ids


def with_probe_image(arch: ArchSpec, ids: Sequence[int]) -> tuple[list[int], ImageBatch | None]:
    """A sequence with a fixed pseudo-random image of 8 x 8 tokens put before it.

    Media tokens that the sequence holds by chance become another token, since nothing fills them.

    Raises:
        ValueError: the model takes text only.
    """
    if arch.vision is None or arch.image_token_id is None:
        raise ValueError(f"{arch.name} takes text only")
    vision = arch.vision
    grid = (1, 8 * vision.merge_height, 8 * vision.merge_width)
    draw = torch.Generator().manual_seed(21)
    shape = (grid[1] * grid[2], 3, vision.patch_size, vision.patch_size)
    patches = 2 * torch.rand(shape, generator=draw) - 1
    rows = range(vision.num_tokens(grid))
    media = {arch.image_token_id, arch.video_token_id, *(arch.video_span or ())}
    other = next(i for i in range(arch.vocab_size) if i not in media)
    text = [other if i in media else i for i in ids]
    return [arch.image_token_id] * len(rows) + text, ImageBatch.join([patches], [grid], rows)


def token_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative error per token, ||found - wanted|| / ||wanted||, [T] float64."""
    found, wanted = found.double(), wanted.double()
    error = torch.linalg.vector_norm(found - wanted, dim=-1)
    relative: Tensor = error / torch.linalg.vector_norm(wanted, dim=-1).clamp_min(1e-30)
    return relative
