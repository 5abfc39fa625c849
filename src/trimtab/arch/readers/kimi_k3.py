"""config.json of `kimi_k3` (Kimi K3, and K3.1 with its sparse-attention indexer) -> ArchSpec.

Knows: the nesting text_config / vision_config, attention residuals, latent experts, SiTU, the
MXFP4 declaration and `dsa_config`. Does not know: released tensor names (see `maps.kimi_k3`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trimtab.arch.readers import kimi_text
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import (
    ActivationSpec,
    ArchSpec,
    AttnRes,
    DenseSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    MoESpec,
    PlainResidual,
    VisionSpec,
)

# The one place that spells K3.1's indexer fields.
DSA_HEADS, DSA_DIM, DSA_TOP_K = "index_n_heads", "index_head_dim", "index_topk"

_ARCHITECTURES = {
    "KimiK3ForConditionalGeneration", "KimiK31ForConditionalGeneration", "KimiLinearForCausalLM",
}
_TOP_NOISE = kimi_text.NOISE | {"ignore_index", "image_placeholder"}
_TEXT_TYPES = ("kimi_linear", "kimi_k3", "kimi_k3_text")
_MXFP4_GROUP = 32
_VISION_FIXED: dict[str, str | bool] = {
    "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "linear_bias": False,
    "merge_type": "sd2_tpool", "mlp_type": "mlp2", "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm", "patch_embed_proj_bias": False, "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
}


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a `kimi_k3` config; a text-only one has no vision_config.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    top = Fields(config, source=source)
    text = top.section("text_config")
    _check_kind(top, text)
    eps = text.number("rms_norm_eps", positive=True)
    indexer = _read_indexer(top, text, eps)
    dtype = kimi_text.read_dtype(text, top)
    hidden = text.integer("hidden_size")
    vision = None
    if top.present("vision_config"):
        vision = _read_vision(top.section("vision_config"), hidden)
    return ArchSpec(
        family="kimi_k3",
        name="Kimi K3" if indexer is None else "Kimi K3.1",
        hidden_size=hidden,
        vocab_size=text.integer("vocab_size"),
        layers=_read_layers(top, text, eps, indexer),
        residual=_read_residual(text, eps),
        norm_eps=eps,
        max_position_embeddings=text.integer("max_position_embeddings"),
        dtype=dtype,
        tie_word_embeddings=_read_tied(top, text),
        bos_token_id=_token_id(top, text, "bos_token_id"),
        eos_token_id=_token_id(top, text, "eos_token_id"),
        pad_token_id=_token_id(top, text, "pad_token_id"),
        image_token_id=kimi_text.read_token_id(top, "media_placeholder_token_id"),
        vision=vision,
        unsupported=kimi_text.read_mtp(text),
        ignored=text.finish(kimi_text.NOISE) + top.finish(_TOP_NOISE),
    )


def _check_kind(top: Fields, text: Fields) -> None:
    top.expect("model_type", "kimi_k3", "this reader knows one family")
    for fields in (top, text):
        if fields.present("architectures"):
            unknown = sorted(set(fields.words("architectures")) - _ARCHITECTURES)
            if unknown:
                rule = f"must be of {', '.join(sorted(_ARCHITECTURES))}"
                raise fields.fail("architectures", rule)
    if text.present("model_type"):
        text.choice("model_type", _TEXT_TYPES)


def _read_layers(
    top: Fields, text: Fields, eps: float, indexer: IndexerSpec | None
) -> tuple[LayerSpec, ...]:
    activation = _read_activation(text)
    latent = _read_latent(text, eps)
    moe = _with_form(top, text, kimi_text.read_moe(text, activation, latent))
    gated = text.boolean("mla_use_output_gate", default=False)
    return kimi_text.build_layers(
        kimi_text.read_schedule(text),
        kimi_text.read_kda(text, eps, extra=("gate_lower_bound", "use_full_rank_gate")),
        kimi_text.read_mla(text, gated=gated, indexer=indexer),
        DenseSpec(text.integer("intermediate_size"), activation),
        moe,
    )


def _read_indexer(top: Fields, text: Fields, eps: float) -> IndexerSpec | None:
    """`dsa_config`, in text_config or at the top level; its key norm takes rms_norm_eps."""
    places = [fields for fields in (text, top) if fields.present("dsa_config")]
    if not places:
        return None
    if len(places) == 2:
        raise top.fail("dsa_config", "stands in text_config too; keep one of the two")
    dsa = places[0].section("dsa_config")
    spec = IndexerSpec(
        heads=dsa.integer(DSA_HEADS), dim=dsa.integer(DSA_DIM), top_k=dsa.integer(DSA_TOP_K),
        norm_eps=eps,
    )
    dsa.finish(())
    return spec


def _read_activation(text: Fields) -> ActivationSpec:
    if text.choice("hidden_act", ("situ", "silu")) == "silu":
        text.skip("activation_situ_beta", "activation_situ_linear_beta")
        return ActivationSpec("swiglu")
    beta = text.number("activation_situ_beta", positive=True)
    linear = text.optional_number("activation_situ_linear_beta")
    if linear is not None and linear <= 0:
        raise text.fail("activation_situ_linear_beta", "must be a positive number or null")
    return ActivationSpec("situ", beta, linear)


def _read_latent(text: Fields, eps: float) -> LatentSpec | None:
    use_norm = text.boolean("latent_moe_use_norm", default=False)
    size = text.optional_integer("routed_expert_hidden_size", minimum=1)
    return None if size is None else LatentSpec(size, eps if use_norm else None)


def _read_residual(text: Fields, eps: float) -> AttnRes | PlainResidual:
    size = text.optional_integer("attn_res_block_size", minimum=0)
    return AttnRes(size, eps) if size else PlainResidual()


def _read_tied(top: Fields, text: Fields) -> bool:
    tied = text.boolean("tie_word_embeddings", default=False)
    if top.boolean("tie_word_embeddings", default=tied) != tied:
        raise top.fail("tie_word_embeddings", "contradicts text_config.tie_word_embeddings")
    return tied


def _token_id(top: Fields, text: Fields, key: str) -> int | None:
    inner, outer = kimi_text.read_token_id(text, key), kimi_text.read_token_id(top, key)
    if inner is not None and outer is not None and inner != outer:
        raise top.fail(key, f"contradicts text_config.{key} ({inner})")
    return outer if inner is None else inner


def _with_form(top: Fields, text: Fields, moe: MoESpec) -> MoESpec:
    """Set how routed experts are stored: MXFP4 where a quantization_config says so."""
    places = [fields for fields in (text, top) if fields.present("quantization_config")]
    if not places:
        return moe
    quant = places[0].section("quantization_config")
    quant.expect("format", "mxfp4-pack-quantized", "no other packed format is read")
    quant.expect("quant_method", "compressed-tensors", "no other quantization method is read")
    groups = quant.section("config_groups")
    group = groups.section("group_0")
    groups.finish(())  # a second group would store other modules in another way
    weights = group.section("weights")
    weights.expect("num_bits", 4, "MXFP4 has four bits")
    weights.expect("type", "float", "MXFP4 is a float format")
    weights.expect("group_size", _MXFP4_GROUP, "MXFP4 has one scale per 32 elements")
    weights.expect("symmetric", True, "MXFP4 has no zero point")
    width = None if moe.latent is None else moe.latent.size
    for key, size in (
        ("routed_expert_hidden_size" if width else "hidden_size", width or text.integer("hidden_size")),
        ("moe_intermediate_size", moe.intermediate_size),
    ):
        if size % _MXFP4_GROUP:
            raise text.fail(key, f"must be a multiple of {_MXFP4_GROUP} with MXFP4 experts")
    return replace(moe, form="mxfp4")


def _read_vision(vision: Fields, text_hidden: int) -> VisionSpec:
    for key, wanted in _VISION_FIXED.items():
        vision.expect(key, wanted, "the tower has one released form")
    vision.expect("text_hidden_size", text_hidden, "the projector writes into the text model")
    hidden = vision.integer("vt_hidden_size")
    vision.expect("mm_hidden_size", hidden, "the projector reads the tower's width")
    merge = vision.integers("merge_kernel_size")
    if len(merge) != 2 or min(merge) < 1:
        raise vision.fail("merge_kernel_size", "must be two positive whole numbers")
    spec = VisionSpec(
        num_layers=vision.integer("vt_num_hidden_layers"),
        hidden_size=hidden,
        num_heads=vision.integer("vt_num_attention_heads"),
        qkv_hidden_size=vision.integer("qkv_hidden_size"),
        intermediate_size=vision.integer("vt_intermediate_size"),
        patch_size=vision.integer("patch_size"),
        pos_emb_height=vision.integer("init_pos_emb_height"),
        pos_emb_width=vision.integer("init_pos_emb_width"),
        pos_emb_time=vision.integer("init_pos_emb_time"),
        merge_height=merge[0],
        merge_width=merge[1],
        projector_eps=vision.number("projector_ln_eps", positive=True),
    )
    if spec.qkv_hidden_size % (4 * spec.num_heads):
        rule = "must be a multiple of 4 per head: the rotary turns pairs of two axes"
        raise vision.fail("qkv_hidden_size", rule)
    if hidden % 2:
        raise vision.fail("vt_hidden_size", "must be even: half of the time table is sines")
    vision.finish(kimi_text.NOISE)
    return spec
