"""The vision tower with axial rotary positions, and the merger that is its projector.

Shapes: N patches of all items of a batch, M tokens, D tower width, W decoder width. A patch spans
several frames; attention stays inside each such slice of an item.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.arch.spec import AxialVisionSpec
from trimtab.models.context import ForwardContext
from trimtab.models.linear import LayerNormWeights, Linear, RMSNorm
from trimtab.ops.activation import gated_activation
from trimtab.ops.norm import layer_norm
from trimtab.ops.precision import island_dtype, linear
from trimtab.ops.rope import rotate
from trimtab.ops.vision import Grid, axial_angles, image_attention, merge_patches


class Kernel(nn.Module):
    """Weight and bias of a convolution whose stride is its kernel: a linear map of each block."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype), requires_grad=False)


class AxialPatchEmbed(nn.Module):
    """A linear map of each patch."""

    def __init__(self, spec: AxialVisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.frames = spec.patch_frames
        shape = (spec.hidden_size, 3, spec.patch_frames, spec.patch_size, spec.patch_size)
        self.proj = Kernel(shape, dtype)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, 3, F, P, P], or [N, 3, P, P] of still images, which are repeated -> [N, D]."""
        if patches.dim() == 4:
            patches = patches.unsqueeze(2).expand(-1, -1, self.frames, -1, -1)
        y = linear(patches.flatten(1), self.proj.weight.flatten(1))
        return y + self.proj.bias.to(y.dtype)


class AxialAttention(nn.Module):
    """Attention inside each slice, with normed and rotated queries and keys."""

    def __init__(self, spec: AxialVisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        d = spec.hidden_size
        self.heads = (3, spec.num_heads, spec.head_dim)
        self.scale = spec.head_dim**-0.5
        self.qkv = Linear(d, 3 * d, dtype, bias=True)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype)
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype)
        self.proj = Linear(d, d, dtype, bias=True)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], lengths: tuple[int, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """[N, D] -> [N, D]; rotary is (cos, sin), each [N, K/2]."""
        q, k, v = self.qkv(x, ctx).unflatten(-1, self.heads).unbind(1)
        q, k = (rotate(y, *rotary, "half") for y in (self.q_norm(q), self.k_norm(k)))
        y: Tensor = self.proj(image_attention(q, k, v, self.scale, lengths).flatten(1), ctx)
        return y


class AxialMLP(nn.Module):
    """down( act(gate x, up x) ), each with a bias."""

    def __init__(self, spec: AxialVisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        d, f = spec.hidden_size, spec.intermediate_size
        self.activation = spec.activation
        self.gate_proj = Linear(d, f, dtype, bias=True)
        self.up_proj = Linear(d, f, dtype, bias=True)
        self.down_proj = Linear(f, d, dtype, bias=True)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[N, D] -> [N, D]."""
        act = gated_activation(self.activation, self.gate_proj(x, ctx), self.up_proj(x, ctx))
        y: Tensor = self.down_proj(act, ctx)
        return y


class AxialBlock(nn.Module):
    """Pre-norm attention, then the gated MLP."""

    def __init__(self, spec: AxialVisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.attn = AxialAttention(spec, dtype)
        self.norm2 = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.mlp = AxialMLP(spec, dtype)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], lengths: tuple[int, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """[N, D] -> [N, D]."""
        x = x + self.attn(self.norm1(x), rotary, lengths, ctx)
        y: Tensor = x + self.mlp(self.norm2(x), ctx)
        return y


class AxialVisionTower(nn.Module):
    """Patch embedding, encoder, final norm and the convolution that makes tokens of patches."""

    def __init__(self, spec: AxialVisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = AxialPatchEmbed(spec, dtype)
        self.blocks = nn.ModuleList(AxialBlock(spec, dtype) for _ in range(spec.num_layers))
        self.post_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        shape = (spec.out_hidden_size, spec.hidden_size, spec.merge_size, spec.merge_size)
        self.downsample = Kernel(shape, dtype)

    def forward(self, patches: Tensor, grids: tuple[Grid, ...], ctx: ForwardContext) -> Tensor:
        """Encode all items at once.

        Args:
            patches: [N, 3, F, P, P] or [N, 3, P, P] in the compute dtype, slice by slice and row
                by row.
            grids: slices, rows and columns of each item.
            ctx: passed to the linear modules.

        Returns:
            [M, W].
        """
        slices = [(1, rows, columns) for count, rows, columns in grids for _ in range(count)]
        spec = self.spec
        tables = {g: axial_angles(g, spec.head_dim, spec.rope_theta) for g in set(slices)}
        angles = torch.cat([tables[grid] for grid in slices])
        x = self.patch_embed(patches)
        dtype = island_dtype(x)
        rotary = (angles.cos().to(x.device, dtype), angles.sin().to(x.device, dtype))
        lengths = tuple(rows * columns for _, rows, columns in slices)
        for block in self.blocks:
            x = block(x, rotary, lengths, ctx)
        side = spec.merge_size
        merged = merge_patches(self.post_layernorm(x), slices, (side, side))
        # A merged row holds patch after patch, the kernel channel after channel.
        y = linear(merged, self.downsample.weight.permute(0, 2, 3, 1).flatten(1))
        return y + self.downsample.bias.to(y.dtype)


class Merger(nn.Module):
    """h = gelu( layer_norm( P x ) ) with the exact GELU, then down( act(gate h, up h) )."""

    def __init__(self, spec: AxialVisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner = spec.out_hidden_size, spec.projector_intermediate_size
        self.activation, self.eps = spec.activation, spec.projector_eps
        self.proj = Linear(width, width, dtype)
        self.post_projection_norm = LayerNormWeights(width, dtype)
        self.gate_proj = Linear(width, inner, dtype)
        self.up_proj = Linear(width, inner, dtype)
        self.down_proj = Linear(inner, width, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[M, W] -> [M, W]."""
        norm = self.post_projection_norm
        h = functional.gelu(layer_norm(self.proj(x, ctx), norm.weight, norm.bias, self.eps))
        act = gated_activation(self.activation, self.gate_proj(h, ctx), self.up_proj(h, ctx))
        y: Tensor = self.down_proj(act, ctx)
        return y
