"""What the model makes of the first images of a run, said once.

Knows: one micro-batch with images. Does not know: recipes, files.

Shape letters: M image tokens, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trimtab.errors import RunError
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.train.batch import MicroBatch, on_device


@torch.no_grad()
def describe_features(model: CausalLM, batch: MicroBatch) -> str:
    """Run tower and projector once and say in one line what goes into the embedding rows.

    Placeholder rows, patch grids and patches are held against each other on the way.

    Args:
        model: as it is trained.
        batch: with images.

    Raises:
        DataError: TT407, counts do not fit.
        RunError: TT602, a feature is not finite.
    """
    vision, device = model.arch.vision, model.embed.weight.device
    images = on_device(batch.images, device)
    assert images is not None, "called for a micro-batch with images"
    context = ForwardContext.packed(batch.lengths, device, token_ids=batch.token_ids.to(device))
    ids = batch.input_ids.to(device)
    features = model.image_features(ids, images, context)  # [M, D]
    assert vision is not None, "a model with image features has a tower"
    if not bool(torch.isfinite(features).all()):
        raise RunError("TT602", "image features", "the tower or the projector gives NaN or infinity",
                       hint="set finetune.compute_dtype: fp32")
    text = model.embed.weight[ids[ids != model.arch.image_token_id]]
    assert model.vision is not None, "checked by image_features"
    stored = model.vision.patch_embed.proj.weight.dtype
    return (
        f"image features: {_name(features.dtype)} {list(features.shape)} from patches in "
        f"{_name(images.patches.dtype)} and weights in {_name(stored)}, one row per "
        f"{vision.merge_height} x {vision.merge_width} patches, row by row, "
        f"root mean square {_rms(features):.3g} (text rows {_rms(text):.3g}); "
        f"written over the embeddings of token {model.arch.image_token_id}: "
        f"{len(images.rows)} placeholders = image tokens of {len(images.grids)} grids"
    )


def _rms(rows: Tensor) -> float:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return float(wide.square().mean().sqrt())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_with_images(batches: Iterable[MicroBatch]) -> MicroBatch | None:
    """The first micro-batch that has images."""
    return next((batch for batch in batches if batch.images is not None), None)
