"""config.json of `glm5_next` (GLM-5.3-Flash) -> ArchSpec.

Knows: the released spelling and the one that transformers writes, nested or flat (text only).
Does not know: released tensor names (see `maps.glm5_next`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trimtab.arch.readers import kimi_text
from trimtab.arch.readers.deepseek_text import read_moe
from trimtab.arch.readers.fields import Fields
from trimtab.arch.readers.glm_moe_dsa import read_schedule
from trimtab.arch.readers.quantization import read_quantization
from trimtab.arch.spec import (
    ActivationSpec,
    ArchSpec,
    AxialVisionSpec,
    DenseSpec,
    FloatType,
    HyperConnections,
    IndexerSpec,
    KDASpec,
    LayerSpec,
    MLASpec,
    MoESpec,
)

_ARCHITECTURES = {"Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"}
_TEXT_TYPES = ("glm5_next", "glm5_next_text")
_LINEAR = "linear_attention"
_SPARSE = {"deepseek_sparse_attention", "indexed_attention", "full_attention"}
# No effect here: the indexer is not rotated, and prediction layers are not built.
_TEXT_NOISE = kimi_text.NOISE | {
    "index_share_for_mtp_iteration", "indexer_rope_interleave", "router_aux_loss_coef",
}
_TOP_NOISE = kimi_text.NOISE | {"image_start_token_id", "image_end_token_id"}
_VISION_NOISE = kimi_text.NOISE | {"image_size", "model_type", "dtype", "torch_dtype"}
_LATENT_FIXED: dict[str, bool | int] = {
    "mla_use_nope": True, "attention_bias": False, "qk_rope_head_dim": 0,
}
_BOUND = -5.0  # of the decay where `safe_gate` asks for one without naming it


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a `glm5_next` config; a text-only one has no vision_config, or all fields at the top.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    top = Fields(config, source=source)
    nested = top.present("text_config")
    text = top.section("text_config") if nested else top
    _check_kind(top, text)
    dtype = kimi_text.read_dtype(text, top)
    eps = text.number("rms_norm_eps", positive=True)
    hidden = text.integer("hidden_size")
    vision = None
    if nested and top.present("vision_config"):
        vision = _read_vision(top.section("vision_config"), hidden)
    start, end = (kimi_text.read_token_id(top, f"video_{w}_token_id") for w in ("start", "end"))
    layers, mtp = _read_layers(text, eps, dtype)
    arch = ArchSpec(
        family="glm5_next",
        name="GLM-5.3-Flash",
        hidden_size=hidden,
        vocab_size=text.integer("vocab_size"),
        layers=layers,
        residual=_read_residual(text, eps),
        norm_eps=eps,
        max_position_embeddings=text.integer("max_position_embeddings"),
        dtype=dtype,
        tie_word_embeddings=_read_tied(top, text),
        bos_token_id=kimi_text.read_token_id(text, "bos_token_id"),
        eos_token_id=text.first_integer("eos_token_id"),
        pad_token_id=kimi_text.read_token_id(text, "pad_token_id"),
        image_token_id=kimi_text.read_token_id(top, "image_token_id"),
        video_token_id=kimi_text.read_token_id(top, "video_token_id"),
        video_span=None if start is None or end is None else (start, end),
        vision=vision,
        quantization=read_quantization(top if top.present("quantization_config") else text),
        mtp=mtp,
    )
    ignored = text.finish(_TEXT_NOISE if nested else _TEXT_NOISE | _TOP_NOISE)
    return replace(arch, ignored=ignored + (top.finish(_TOP_NOISE) if nested else ()))


def _check_kind(top: Fields, text: Fields) -> None:
    top.choice("model_type", _TEXT_TYPES)
    text.choice("model_type", _TEXT_TYPES, default="glm5_next_text")
    for fields in (top, text):
        if fields.present("architectures"):
            unknown = sorted(set(fields.words("architectures")) - _ARCHITECTURES)
            if unknown:
                rule = f"must be of {', '.join(sorted(_ARCHITECTURES))}"
                raise fields.fail("architectures", rule)


def _read_tied(top: Fields, text: Fields) -> bool:
    tied = text.boolean("tie_word_embeddings", default=False)
    if top.boolean("tie_word_embeddings", default=tied) != tied:
        raise top.fail("tie_word_embeddings", "contradicts text_config.tie_word_embeddings")
    return tied


def _read_residual(text: Fields, eps: float) -> HyperConnections:
    text.expect("mhc", True, "this family has hyper-connections")
    return HyperConnections(
        streams=text.integer("hc_mult"),
        sinkhorn_steps=text.integer("hc_sinkhorn_iters"),
        eps=text.number("hc_eps"),
        norm_eps=eps,
    )


def _read_layers(
    text: Fields, eps: float, dtype: FloatType
) -> tuple[tuple[LayerSpec, ...], tuple[LayerSpec, ...]]:
    """The decoder layers, and those of multi-token prediction."""
    text.choice("hidden_act", ("silu",), default="silu")
    activation = ActivationSpec("swiglu", clamp=text.number("swiglu_limit", positive=True))
    kda, mla = _read_kda(text, eps, dtype), _read_mla(text, eps)
    dense = DenseSpec(text.integer("intermediate_size"), activation)
    moe = _read_moe(text, activation)
    depth = text.integer("num_hidden_layers")
    linear = _read_schedule(text, depth)
    shared = _read_shared(text, linear)
    sparse = kimi_text.moe_layers(text, depth)
    layers = tuple(
        LayerSpec(kda if linear[i] else _sharing(mla, shared[i]), moe if sparse[i] else dense)
        for i in range(depth)
    )
    count = text.integer("num_nextn_predict_layers", minimum=0, default=0)
    return layers, (LayerSpec(mla, moe),) * count


def _sharing(mla: MLASpec, shared: bool) -> MLASpec:
    assert mla.indexer is not None, "every sparse layer of this family has one"
    return replace(mla, indexer=replace(mla.indexer, share="shared")) if shared else mla


def _read_schedule(text: Fields, depth: int) -> tuple[bool, ...]:
    """Which layers are linear attention, from `layer_types`, which the 0-based lists repeat."""
    names = text.words("layer_types")
    if len(names) != depth or not set(names) <= _SPARSE | {_LINEAR}:
        rule = f"must be {depth} of {', '.join(sorted(_SPARSE | {_LINEAR}))}"
        raise text.fail("layer_types", rule)
    linear = tuple(name == _LINEAR for name in names)
    if text.present("linear_attn_config"):
        section = text.section("linear_attn_config")
        for key, kind in (("kda_layers", True), ("full_attn_layers", False)):
            wanted = tuple(i for i in range(depth) if linear[i] is kind)
            if section.present(key) and tuple(sorted(section.integers(key))) != wanted:
                raise section.fail(key, "must be the layers, counted from 0, that layer_types names")
    return linear


def _read_shared(text: Fields, linear: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers reuse the selection of an earlier one."""
    shares = read_schedule(text, len(linear))
    sparse = [name for name, is_linear in zip(shares, linear, strict=True) if not is_linear]
    if sparse and sparse[0] == "shared":
        raise text.fail("indexer_types", "the first sparse layer has no selection to share")
    return tuple(name == "shared" for name in shares)


def _read_kda(text: Fields, eps: float, dtype: FloatType) -> KDASpec:
    if text.present("linear_attn_config"):
        section = text.section("linear_attn_config")
        heads, dim = section.integer("num_heads"), section.integer("head_dim")
        conv = section.integer("short_conv_kernel_size")
        bound = section.optional_number("gate_lower_bound")
        if bound is None and section.boolean("safe_gate", default=True):
            bound = _BOUND
        section.finish(("kda_layers", "full_attn_layers", "safe_gate"))
        text.skip("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        text.skip("linear_lower_bound")
    else:
        heads, dim = text.integer("linear_num_heads"), text.integer("linear_head_dim")
        conv = text.integer("linear_conv_kernel_dim")
        if not text.has("linear_lower_bound"):
            raise text.fail("linear_lower_bound", "the field is missing; null means no bound")
        bound = text.optional_number("linear_lower_bound")
    if bound is not None and bound >= 0:
        raise text.fail("linear_lower_bound", "must be negative; it is a log decay")
    return KDASpec(
        num_heads=heads, head_dim=dim, conv_kernel=conv, gate_lower_bound=bound, decay_rank=dim,
        gate_rank=dim, norm_eps=eps, conv_dtype=dtype,
    )


def _read_mla(text: Fields, eps: float) -> MLASpec:
    for key, wanted in _LATENT_FIXED.items():
        text.expect(key, wanted, "the latent attention of this family has one form")
    heads, nope = text.integer("num_attention_heads"), text.integer("qk_nope_head_dim")
    if text.present("num_key_value_heads") and text.integer("num_key_value_heads") not in (1, heads):
        raise text.fail("num_key_value_heads", f"must be num_attention_heads ({heads}) or 1")
    if text.present("attention_dropout") and text.number("attention_dropout") != 0:
        raise text.fail("attention_dropout", "must be 0")
    return MLASpec(
        num_heads=heads,
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=0,
        v_head_dim=text.integer("v_head_dim"),
        softmax_scale=nope**-0.5,
        latent_eps=eps,
        indexer=_read_indexer(text),
    )


def _read_indexer(text: Fields) -> IndexerSpec:
    text.expect("index_kpool_compress", True, "pooled keys are weighed by a gate")
    spec = IndexerSpec(
        heads=text.integer("index_n_heads"),
        dim=text.integer("index_head_dim"),
        top_k=text.integer("index_topk"),
        pool=text.integer("index_kpool"),
        always_select_tail=text.boolean("index_kpool_always_select_tail", default=True),
    )
    if spec.pool is None or spec.top_k % spec.pool:
        raise text.fail("index_topk", f"must be a multiple of index_kpool ({spec.pool})")
    return spec


def _read_moe(text: Fields, activation: ActivationSpec) -> MoESpec:
    text.expect("moe_router_dtype", "float32", "the router computes in float32")
    experts = text.integer("n_routed_experts")
    if text.present("num_local_experts"):
        text.expect("num_local_experts", experts, "it repeats n_routed_experts")
    return read_moe(text, activation)


def _read_vision(vision: Fields, text_hidden: int) -> AxialVisionSpec:
    vision.expect("attention_bias", True, "projections of the tower have a bias")
    vision.expect("in_channels", 3, "images have three channels")
    vision.expect("out_hidden_size", text_hidden, "the merger writes into the text model")
    vision.choice("hidden_act", ("silu",), default="silu")
    if vision.present("attention_dropout") and vision.number("attention_dropout") != 0:
        raise vision.fail("attention_dropout", "must be 0")
    theta = 10000.0
    if vision.present("rope_parameters"):
        rope = vision.section("rope_parameters")
        rope.expect("rope_type", "axial", "each axis of the image turns half of the channels")
        theta = rope.number("rope_theta", positive=True)
        rope.finish(())
    spec = AxialVisionSpec(
        num_layers=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        num_heads=vision.integer("num_heads"),
        intermediate_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        patch_frames=vision.integer("temporal_patch_size"),
        merge_size=vision.integer("spatial_merge_size"),
        out_hidden_size=text_hidden,
        # The release leaves the width of the merger to the class.
        projector_intermediate_size=vision.integer("projection_intermediate_size", default=10240),
        activation=ActivationSpec("swiglu", clamp=vision.number("swiglu_limit", positive=True)),
        norm_eps=vision.number("rms_norm_eps", positive=True),
        rope_theta=theta,
    )
    if spec.hidden_size % (4 * spec.num_heads):
        rule = "must be a multiple of 4 per head: two axes each turn pairs of channels"
        raise vision.fail("hidden_size", rule)
    vision.finish(_VISION_NOISE)
    return spec
