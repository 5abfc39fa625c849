"""ParamSpec: the full parameter inventory that follows from an ArchSpec.

Knows: our module names, logical shapes, stored dtypes, axes and owners of every parameter.
Does not know: released names or files (see `maps`), torch.

Models have exactly these parameters; plan sums them, LoRA selects from them, verify compares
with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.arch.spec import (
    ArchSpec,
    AttnRes,
    AxialVisionSpec,
    DenseSpec,
    HyperConnections,
    KDASpec,
    MLASpec,
    MoESpec,
    PlainResidual,
    VisionSpec,
)

Owner = Literal[
    "embedding", "kda", "mla", "indexer", "router", "routed_expert", "shared_expert",
    "dense_ffn", "latent", "residual", "norm", "vision", "projector", "head",
    # of families that are only planned
    "gqa", "gated_delta",
]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter.

    Args:
        name: fully qualified name in our modules, the same for all families.
        shape: logical shape, grouped experts as [E, ...].
        dtype: stored dtype; for `mxfp4` the dtype it decodes to.
        axes: a logical axis per dimension, for sharding.
        owner: the kind of module it belongs to.
        form: `mxfp4` where it is stored in packed 4-bit form along the last axis.
        layer: decoder layer index, None outside the stack.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    owner: Owner
    form: Literal["plain", "mxfp4"] = "plain"
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


def inventory(arch: ArchSpec) -> tuple[ParamSpec, ...]:
    """Every parameter of the model, in forward order."""
    return tuple(_all_params(arch))


def _all_params(arch: ArchSpec) -> Iterator[ParamSpec]:
    d, w = arch.hidden_size, arch.vocab_size
    if isinstance(arch.vision, VisionSpec):
        yield from _vision(arch.vision, d, arch.dtype)
    elif arch.vision is not None:
        yield from _axial_vision(arch.vision, arch.dtype)
    yield ParamSpec("embed.weight", (w, d), arch.dtype, ("vocab", "hidden"), "embedding")
    for index in range(arch.num_layers):
        yield from _layer(arch, index)
    if isinstance(arch.residual, AttnRes):
        yield from _res_mix(arch, "output_attn_res", None)
    yield ParamSpec("norm.weight", (d,), arch.dtype, ("hidden",), "norm")
    if not arch.tie_word_embeddings:
        yield ParamSpec("lm_head.weight", (w, d), arch.dtype, ("vocab", "hidden"), "head")


def mtp_inventory(arch: ArchSpec, *, tables: bool) -> tuple[ParamSpec, ...]:
    """Every parameter of the multi-token prediction layers, which no model has.

    Each is a decoder layer with a plain residual, numbered after the others, whose input is eh_proj
    of the normed embedding of the next token beside the normed hidden state.

    Args:
        arch: the model.
        tables: the layers repeat the input table and the head.
    """
    whole = replace(arch, layers=arch.layers + arch.mtp, residual=PlainResidual())
    found: list[ParamSpec] = []
    for index in range(arch.num_layers, whole.num_layers):
        make, d, w = _Maker(f"layers.{index}", arch.dtype, index), arch.hidden_size, arch.vocab_size
        if tables:
            found.append(make("embed_tokens.weight", (w, d), ("vocab", "hidden"), "embedding"))
            found.append(make("shared_head.head.weight", (w, d), ("vocab", "hidden"), "head"))
        found.append(make("enorm.weight", (d,), ("hidden",), "norm"))
        found.append(make("hnorm.weight", (d,), ("hidden",), "norm"))
        found.append(make("eh_proj.weight", (d, 2 * d), ("hidden", "pair"), "dense_ffn"))
        found.append(make("shared_head.norm.weight", (d,), ("hidden",), "norm"))
        found += _layer(whole, index)
    return tuple(found)


def _layer(arch: ArchSpec, index: int) -> Iterator[ParamSpec]:
    layer, d = arch.layers[index], arch.hidden_size
    prefix = f"layers.{index}"
    make = _Maker(prefix, arch.dtype, index)
    if isinstance(arch.residual, AttnRes):
        yield from _res_mix(arch, f"{prefix}.self_attention_res", index)
    if isinstance(arch.residual, HyperConnections):
        yield from _hyper(make, arch.residual, "hc_attn", d)
    yield make("input_layernorm.weight", (d,), ("hidden",), "norm")
    if isinstance(layer.mixer, KDASpec):
        yield from _kda(make, layer.mixer, d)
    else:
        yield from _mla(make, layer.mixer, d)
    if isinstance(arch.residual, AttnRes):
        yield from _res_mix(arch, f"{prefix}.mlp_res", index)
    if isinstance(arch.residual, HyperConnections):
        yield from _hyper(make, arch.residual, "hc_ffn", d)
    yield make("post_attention_layernorm.weight", (d,), ("hidden",), "norm")
    if isinstance(layer.ffn, DenseSpec):
        yield from _gated_ffn(make, "mlp", d, layer.ffn.intermediate_size, "dense_ffn")
    else:
        yield from _moe(make, layer.ffn, d)


def ffn_params(
    ffn: DenseSpec | MoESpec, layer: int, hidden_size: int, *, selection_bias: bool
) -> Iterator[ParamSpec]:
    """The parameters of one feed-forward block, stored in BF16 where they are plain.

    Args:
        ffn: the block.
        layer: its layer.
        hidden_size: D.
        selection_bias: the router adds one before it selects.
    """
    make = _Maker(f"layers.{layer}", "BF16", layer)
    if isinstance(ffn, DenseSpec):
        yield from _gated_ffn(make, "mlp", hidden_size, ffn.intermediate_size, "dense_ffn")
    else:
        bias = "router.e_score_correction_bias"
        for param in _moe(make, ffn, hidden_size):
            if selection_bias or not param.name.endswith(bias):
                yield param


@dataclass(frozen=True, slots=True)
class _Maker:
    """Builds the ParamSpecs of one layer."""

    prefix: str
    dtype: str
    layer: int

    def __call__(
        self, leaf: str, shape: tuple[int, ...], axes: tuple[str, ...], owner: Owner,
        dtype: str | None = None, form: Literal["plain", "mxfp4"] = "plain",
    ) -> ParamSpec:
        name = f"{self.prefix}.{leaf}"
        return ParamSpec(name, shape, dtype or self.dtype, axes, owner, form, self.layer)


def _res_mix(arch: ArchSpec, prefix: str, layer: int | None) -> Iterator[ParamSpec]:
    d = arch.hidden_size
    yield ParamSpec(
        f"{prefix}_norm.weight", (d,), arch.dtype, ("hidden",), "residual", layer=layer
    )
    yield ParamSpec(
        f"{prefix}_proj.weight", (1, d), arch.dtype, ("one", "hidden"), "residual", layer=layer
    )


def _hyper(make: _Maker, spec: HyperConnections, leaf: str, d: int) -> Iterator[ParamSpec]:
    count = spec.num_weights
    axes = ("mix", "streams_hidden")
    yield make(f"{leaf}.fn", (count, spec.streams * d), axes, "residual")
    yield make(f"{leaf}.base", (count,), ("mix",), "residual", "F32")
    yield make(f"{leaf}.scale", (3,), ("mix",), "residual", "F32")


def _kda(make: _Maker, spec: KDASpec, d: int) -> Iterator[ParamSpec]:
    p, at = spec.width, "self_attn"
    for leaf in ("q_proj", "k_proj", "v_proj"):
        yield make(f"{at}.{leaf}.weight", (p, d), ("heads", "hidden"), "kda")
    for leaf in ("q_conv1d", "k_conv1d", "v_conv1d"):
        shape = (p, 1, spec.conv_kernel)
        yield make(f"{at}.{leaf}.weight", shape, ("heads", "one", "taps"), "kda", spec.conv_dtype)
    yield from _low_rank(make, "f", spec.decay_rank, p, d)
    yield make(f"{at}.b_proj.weight", (spec.num_heads, d), ("heads", "hidden"), "kda")
    yield make(f"{at}.A_log", (spec.num_heads,), ("heads",), "kda", spec.dtype)
    yield make(f"{at}.dt_bias", (p,), ("heads",), "kda", spec.dtype)
    yield from _low_rank(make, "g", spec.gate_rank, p, d)
    yield make(f"{at}.o_norm.weight", (spec.head_dim,), ("head_dim",), "kda", spec.conv_dtype)
    yield make(f"{at}.o_proj.weight", (d, p), ("hidden", "heads"), "kda")


def _low_rank(make: _Maker, leaf: str, rank: int | None, p: int, d: int) -> Iterator[ParamSpec]:
    """`{leaf}_proj` at full rank, else the pair `{leaf}_a_proj`, `{leaf}_b_proj`."""
    at = "self_attn"
    if rank is None:
        yield make(f"{at}.{leaf}_proj.weight", (p, d), ("heads", "hidden"), "kda")
        return
    yield make(f"{at}.{leaf}_a_proj.weight", (rank, d), ("rank", "hidden"), "kda")
    yield make(f"{at}.{leaf}_b_proj.weight", (p, rank), ("heads", "rank"), "kda")


def mla_params(spec: MLASpec, layer: int, hidden_size: int) -> Iterator[ParamSpec]:
    """The parameters of one latent attention block, stored in BF16."""
    yield from _mla(_Maker(f"layers.{layer}", "BF16", layer), spec, hidden_size)


def _mla(make: _Maker, spec: MLASpec, d: int) -> Iterator[ParamSpec]:
    h, at = spec.num_heads, "self_attn"
    q_width, latent = h * spec.qk_head_dim, spec.kv_lora_rank
    if spec.q_lora_rank is None:
        yield make(f"{at}.q_proj.weight", (q_width, d), ("heads", "hidden"), "mla")
    else:
        r = spec.q_lora_rank
        yield make(f"{at}.q_a_proj.weight", (r, d), ("latent", "hidden"), "mla")
        yield make(f"{at}.q_a_layernorm.weight", (r,), ("latent",), "mla")
        yield make(f"{at}.q_b_proj.weight", (q_width, r), ("heads", "latent"), "mla")
    kv_a = (latent + spec.qk_rope_head_dim, d)
    yield make(f"{at}.kv_a_proj_with_mqa.weight", kv_a, ("latent", "hidden"), "mla")
    yield make(f"{at}.kv_a_layernorm.weight", (latent,), ("latent",), "mla")
    kv_b = (h * (spec.qk_nope_head_dim + spec.v_head_dim), latent)
    yield make(f"{at}.kv_b_proj.weight", kv_b, ("heads", "latent"), "mla")
    if spec.gate is not None:
        g_width = h * spec.v_head_dim if spec.gate == "channel" else h
        yield make(f"{at}.g_proj.weight", (g_width, d), ("heads", "hidden"), "mla")
    yield make(f"{at}.o_proj.weight", (d, h * spec.v_head_dim), ("hidden", "heads"), "mla")
    yield from _indexer(make, spec, d)


def _indexer(make: _Maker, spec: MLASpec, d: int) -> Iterator[ParamSpec]:
    index = spec.indexer
    if index is None or index.share == "shared":
        return
    at = "self_attn.indexer"
    q_in = d if spec.q_lora_rank is None else spec.q_lora_rank
    wq = (index.heads * index.dim, q_in)
    yield make(f"{at}.wq_b.weight", wq, ("index_heads", "latent"), "indexer")
    yield make(f"{at}.wk.weight", (index.dim, d), ("index_dim", "hidden"), "indexer")
    yield make(f"{at}.k_norm.weight", (index.dim,), ("index_dim",), "indexer")
    yield make(f"{at}.k_norm.bias", (index.dim,), ("index_dim",), "indexer")
    yield make(f"{at}.weights_proj.weight", (index.heads, d), ("index_heads", "hidden"), "indexer")
    if index.pool is not None:
        shape = (index.pool, index.dim)
        yield make(f"{at}.index_kpool_compress_ape", shape, ("slot", "index_dim"), "indexer")
        gate = (index.dim, d)
        yield make(f"{at}.index_kpool_compress_gate", gate, ("index_dim", "hidden"), "indexer")


def _gated_ffn(make: _Maker, at: str, d: int, f: int, owner: Owner) -> Iterator[ParamSpec]:
    yield make(f"{at}.gate_proj.weight", (f, d), ("ffn", "hidden"), owner)
    yield make(f"{at}.up_proj.weight", (f, d), ("ffn", "hidden"), owner)
    yield make(f"{at}.down_proj.weight", (d, f), ("hidden", "ffn"), owner)


def _moe(make: _Maker, spec: MoESpec, d: int) -> Iterator[ParamSpec]:
    e, f = spec.num_experts, spec.intermediate_size
    yield make("mlp.router.weight", (e, d), ("expert", "hidden"), "router")
    yield make("mlp.router.e_score_correction_bias", (e,), ("expert",), "router", "F32")
    width, inner = d, "hidden"
    if spec.latent is not None:
        width, inner = spec.latent.size, "latent"
        yield make("mlp.latent_down.weight", (width, d), ("latent", "hidden"), "latent")
    gate_up, down = (e, 2, f, width), (e, width, f)
    axes = ("expert", "gate_up", "ffn", inner)
    yield make("mlp.experts.gate_up", gate_up, axes, "routed_expert", form=spec.form)
    down_axes = ("expert", inner, "ffn")
    yield make("mlp.experts.down", down, down_axes, "routed_expert", form=spec.form)
    if spec.latent is not None:
        if spec.latent.norm_eps is not None:
            yield make("mlp.latent_norm.weight", (width,), ("latent",), "latent")
        yield make("mlp.latent_up.weight", (d, width), ("hidden", "latent"), "latent")
    if spec.shared_intermediate_size:
        f = spec.shared_intermediate_size
        yield from _gated_ffn(make, "mlp.shared_experts", d, f, "shared_expert")


@dataclass(frozen=True, slots=True)
class _VisionMaker:
    """Builds the ParamSpecs of tower and projector."""

    dtype: str

    def __call__(
        self, leaf: str, shape: tuple[int, ...], owner: Owner = "vision"
    ) -> ParamSpec:
        axes = tuple(f"vision_{n}" for n in range(len(shape)))
        return ParamSpec(f"{owner}.{leaf}", shape, self.dtype, axes, owner)

    def biased(
        self, module: str, shape: tuple[int, ...], owner: Owner = "vision"
    ) -> Iterator[ParamSpec]:
        """Weight and bias of a module."""
        yield self(f"{module}.weight", shape, owner)
        yield self(f"{module}.bias", shape[:1], owner)


def _vision(spec: VisionSpec, text_hidden: int, dtype: str) -> Iterator[ParamSpec]:
    d, qkv, f = spec.hidden_size, spec.qkv_hidden_size, spec.intermediate_size
    make = _VisionMaker(dtype)
    yield make("patch_embed.proj.weight", (d, 3, spec.patch_size, spec.patch_size))
    grid = (spec.pos_emb_height, spec.pos_emb_width, d)
    yield make("patch_embed.pos_emb.weight", grid)
    for i in range(spec.num_layers):
        at = f"blocks.{i}"
        yield make(f"{at}.norm0.weight", (d,))
        yield make(f"{at}.wqkv.weight", (3 * qkv, d))
        yield make(f"{at}.wo.weight", (d, qkv))
        yield make(f"{at}.norm1.weight", (d,))
        yield make(f"{at}.mlp.fc0.weight", (f, d))
        yield make(f"{at}.mlp.fc1.weight", (d, f))
    yield make("final_layernorm.weight", (d,))
    merged = spec.merged_size
    yield make("proj.0.weight", (merged, merged), "projector")
    yield make("proj.2.weight", (text_hidden, merged), "projector")
    yield make("post_norm.weight", (text_hidden,), "projector")


def _axial_vision(spec: AxialVisionSpec, dtype: str) -> Iterator[ParamSpec]:
    d, f, side = spec.hidden_size, spec.intermediate_size, spec.patch_size
    make = _VisionMaker(dtype)
    yield from make.biased("patch_embed.proj", (d, 3, spec.patch_frames, side, side))
    for i in range(spec.num_layers):
        at = f"blocks.{i}"
        yield make(f"{at}.norm1.weight", (d,))
        yield from make.biased(f"{at}.attn.qkv", (3 * d, d))
        yield make(f"{at}.attn.q_norm.weight", (spec.head_dim,))
        yield make(f"{at}.attn.k_norm.weight", (spec.head_dim,))
        yield from make.biased(f"{at}.attn.proj", (d, d))
        yield make(f"{at}.norm2.weight", (d,))
        yield from make.biased(f"{at}.mlp.gate_proj", (f, d))
        yield from make.biased(f"{at}.mlp.up_proj", (f, d))
        yield from make.biased(f"{at}.mlp.down_proj", (d, f))
    yield make("post_layernorm.weight", (d,))
    width = spec.out_hidden_size
    yield from make.biased("downsample", (width, d, spec.merge_size, spec.merge_size))
    inner = spec.projector_intermediate_size
    yield make("proj.weight", (width, width), "projector")
    yield from make.biased("post_projection_norm", (width,), "projector")
    yield make("gate_proj.weight", (inner, width), "projector")
    yield make("up_proj.weight", (inner, width), "projector")
    yield make("down_proj.weight", (width, inner), "projector")
