"""The vision tower (MoonViT) and its projector: patches of images in, rows for the decoder out.

Shapes: N patches of all images of a batch, M image tokens, D tower width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.arch.spec import ArchSpec, AxialVisionSpec, VisionSpec
from trimtab.errors import DataError
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.linear import Linear, RMSNorm, Weight
from trimtab.ops.precision import island_dtype, linear
from trimtab.ops.vision import (
    Grid,
    image_attention,
    merge_patches,
    resize_positions,
    rotary_angles,
    rotate_pairs,
    time_table,
)

_COUNT_HINT = "prompt and images must come from the same preprocessing; see `trimtab data preview`"


class PatchEmbed(nn.Module):
    """A linear map of each patch, plus its position in the image and its frame."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        d, side = spec.hidden_size, spec.patch_size
        self.proj = Weight((d, 3, side, side), dtype)
        self.pos_emb = Weight((spec.pos_emb_height, spec.pos_emb_width, d), dtype)

    def forward(self, patches: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """[N, 3, P, P] in the compute dtype -> [N, D]."""
        x = linear(patches.flatten(1), self.proj.weight.flatten(1))
        tables = {grid: self._positions(grid, x) for grid in set(grids)}
        return x + torch.cat([tables[grid] for grid in grids])

    def _positions(self, grid: Grid, x: Tensor) -> Tensor:
        frames, rows, columns = grid
        space = resize_positions(self.pos_emb.weight, rows, columns).to(island_dtype(x))
        if frames == 1:
            return space.to(x.dtype)
        time = time_table(frames, space.shape[-1], x.device).to(space.dtype)
        return (time.unsqueeze(1) + space).flatten(0, 1).to(x.dtype)


class EncoderMLP(nn.Module):
    """fc1( gelu_tanh( fc0 x ) )."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc0 = Linear(spec.hidden_size, spec.intermediate_size, dtype)
        self.fc1 = Linear(spec.intermediate_size, spec.hidden_size, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[N, D] -> [N, D]."""
        y: Tensor = self.fc1(functional.gelu(self.fc0(x, ctx), approximate="tanh"), ctx)
        return y


class EncoderBlock(nn.Module):
    """Pre-norm attention inside each image, then the MLP."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = (3, spec.num_heads, spec.head_dim)
        self.scale = spec.head_dim**-0.5
        self.norm0 = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.wqkv = Linear(spec.hidden_size, 3 * spec.qkv_hidden_size, dtype)
        self.wo = Linear(spec.qkv_hidden_size, spec.hidden_size, dtype)
        self.norm1 = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.mlp = EncoderMLP(spec, dtype)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], lengths: tuple[int, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """[N, D] -> [N, D]; rotary is (cos, sin), each [N, K/2]."""
        q, k, v = self.wqkv(self.norm0(x), ctx).unflatten(-1, self.heads).unbind(1)
        q, k = rotate_pairs(q, *rotary), rotate_pairs(k, *rotary)
        mixed = image_attention(q, k, v, self.scale, lengths)
        x = x + self.wo(mixed.flatten(1), ctx)
        y: Tensor = x + self.mlp(self.norm1(x), ctx)
        return y


class VisionTower(nn.Module):
    """Patch embedding, encoder, final norm and the merge of patches into tokens."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, dtype)
        self.blocks = nn.ModuleList(EncoderBlock(spec, dtype) for _ in range(spec.num_layers))
        self.final_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)

    def forward(self, patches: Tensor, grids: tuple[Grid, ...], ctx: ForwardContext) -> Tensor:
        """Encode all images at once.

        Args:
            patches: [N, 3, P, P] in the compute dtype.
            grids: frames, rows and columns of each image.
            ctx: passed to the linear modules.

        Returns:
            [M, merged width], the patches of a token side by side.
        """
        spec = self.spec
        x = self.patch_embed(patches, grids)
        tables = {g: rotary_angles(g, spec.head_dim, spec.rope_theta) for g in set(grids)}
        angles = torch.cat([tables[grid] for grid in grids])
        dtype = island_dtype(x)
        rotary = (angles.cos().to(x.device, dtype), angles.sin().to(x.device, dtype))
        lengths = tuple(frames * rows * columns for frames, rows, columns in grids)
        for block in self.blocks:
            x = block(x, rotary, lengths, ctx)
        return merge_patches(
            self.final_layernorm(x), grids, (spec.merge_height, spec.merge_width)
        )


class Projector(nn.Module):
    """norm( W2 gelu( W0 x ) ) from the merged width to that of the decoder, with the exact GELU."""

    def __init__(self, spec: VisionSpec, d: int, dtype: torch.dtype) -> None:
        super().__init__()
        merged = spec.merged_size
        self.proj = nn.ModuleDict({"0": Linear(merged, merged, dtype), "2": Linear(merged, d, dtype)})
        self.post_norm = RMSNorm(d, spec.projector_eps, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[M, merged width] -> [M, decoder width]."""
        hidden = functional.gelu(self.proj["0"](x, ctx))
        y: Tensor = self.post_norm(self.proj["2"](hidden, ctx))
        return y


def check_images(
    images: ImageBatch, arch: ArchSpec, input_ids: Tensor, *, continues: bool = False
) -> None:
    """Hold patches, grids, rows and placeholder tokens of a batch against each other.

    Counts are checked always, token values on the CPU only: elsewhere a look costs a wait.

    Args:
        images: what fills the placeholders.
        arch: of a model with a tower.
        input_ids: [T], the pack.
        continues: the pack goes on where a cache ends, so that a video may have begun before it.

    Raises:
        DataError: TT407, with both sides of what differs.
    """
    spec = arch.vision
    assert spec is not None, "only called for a model with a tower"
    for number, grid in enumerate(images.grids):
        _check_grid(number, grid, spec)
    patches = sum(t * h * w for t, h, w in images.grids)
    if images.patches.shape[0] != patches:
        raise DataError("TT407", "images", f"the grids make {patches} patches",
                        value=f"{images.patches.shape[0]} patches")
    tokens = sum(spec.num_tokens(grid) for grid in images.grids)
    if images.rows.shape[0] != tokens:
        raise DataError("TT407", "images", f"the grids make {tokens} image tokens",
                        value=f"{images.rows.shape[0]} placeholder rows", hint=_COUNT_HINT)
    if input_ids.device.type != "cpu" or arch.image_token_id is None:
        return
    places = (input_ids == arch.image_token_id).nonzero().squeeze(1)
    if not torch.equal(places, images.rows.to(places.device)):
        rule = f"the {tokens} rows given are not those of the placeholder token {arch.image_token_id}"
        raise DataError("TT407", "images", rule, value=f"{len(places)} placeholders",
                        hint=_COUNT_HINT)
    if not continues:
        _check_videos(images, arch, input_ids)


def _check_grid(number: int, grid: Grid, spec: VisionSpec | AxialVisionSpec) -> None:
    frames, rows, columns = grid
    most = spec.max_frames
    if min(grid) >= 1 and (most is None or frames <= most) and not (
        rows % spec.merge_height or columns % spec.merge_width
    ):
        return
    rule = (
        f"must have {'one frame or more' if most is None else f'1 to {most} frames'}, and rows and "
        f"columns that are multiples of {spec.merge_height} and {spec.merge_width}"
    )
    raise DataError("TT407", f"image {number}: grid", rule, value=grid)


def _check_videos(images: ImageBatch, arch: ArchSpec, input_ids: Tensor) -> None:
    """Where videos have tokens of their own, an item of several frames stands between them."""
    if arch.video_token_id is not None and bool((input_ids == arch.video_token_id).any()):
        rule = f"videos use the placeholder of images, {arch.image_token_id}, between their own tokens"
        raise DataError("TT407", "input_ids", rule, value=arch.video_token_id)
    if arch.video_span is None or arch.vision is None:
        return
    start, end = (torch.cumsum(input_ids == token, 0) for token in arch.video_span)
    inside, begin = (start > end)[images.rows], 0
    for number, grid in enumerate(images.grids):
        count = arch.vision.num_tokens(grid)
        if grid[0] > 1 and not bool(inside[begin : begin + count].all()):
            rule = f"a video stands between the tokens {arch.video_span[0]} and {arch.video_span[1]}"
            raise DataError("TT407", f"image {number}: grid", rule, value=grid)
        begin += count
