"""config.json of families that Trimtab plans but does not train -> Outline.

Knows: the few fields that sizes follow from. Does not know: anything that only the computation
needs; unlike the other readers, this one passes over fields that it does not use.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.arch.outline import (
    GatedDeltaSpec,
    GQASpec,
    Outline,
    OutlineLayer,
    OutlineMixer,
    planned_outline,
)
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import ActivationSpec, DenseSpec, MLASpec, MoESpec

# model_type -> what users call the family.
NAMES: dict[str, str] = {
    "deepseek_v2": "DeepSeek-V2",
    "glm4_moe": "GLM-4.5",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss",
    "llama": "Llama",
    "megatron_gpt": "Megatron GPT",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2 MoE",
    "qwen2_5_vl": "Qwen2.5-VL (text)",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 MoE",
    "qwen3_moe": "Qwen3 MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl": "Qwen3-VL (text)",
    "qwen3_vl_moe": "Qwen3-VL MoE (text)",
}
_SWIGLU = ActivationSpec("swiglu")
_QK_NORM = ("qwen3", "glm4_moe")
_QKV_BIAS = ("qwen2",)


def read_planned(config: Mapping[str, object], source: str) -> Outline:
    """Read the config of one of the families in `NAMES`.

    Args:
        config: the parsed config.json; the text model may be nested under `text_config`.
        source: where it came from, for messages.

    Raises:
        ArchError: a field is missing or has a wrong type or value (TT202).
    """
    top = Fields(config, source=source)
    family = top.choice("model_type", NAMES)
    text = top.section("text_config") if top.present("text_config") else top
    depth = text.integer("num_hidden_layers")
    is_gpt = family == "megatron_gpt"
    ffns = _ffns(text, family, depth)
    mixers = _mixers(text, family, depth)
    layers = tuple(
        OutlineLayer(
            mixer, ffn, expert_bias=family == "gpt_oss",
            selection_bias=family.startswith("glm4") or text.boolean("selection_bias", default=False),
            shared_gate=text.present("shared_expert_intermediate_size") and not is_gpt,
            gated=text.boolean("gated_mlp", default=True),
            ffn_bias=text.boolean("mlp_bias", default=False),
            norm_bias=text.boolean("norm_bias", default=False),
        )
        for mixer, ffn in zip(mixers, ffns, strict=True)
    )
    tied = text.boolean("tie_word_embeddings", default=False)
    return planned_outline(
        family, NAMES[family], text.integer("hidden_size"), text.integer("vocab_size"), layers,
        tied=tied, max_positions=text.integer("max_position_embeddings", default=4096),
        fp8_block=_fp8_block(top, family),
        learned_positions=text.integer("learned_positions", minimum=0, default=0),
    )


def _fp8_block(top: Fields, family: str) -> tuple[int, int] | None:
    """The block that shares a scale in an FP8 release, None for a BF16 one."""
    if not top.present("quantization_config"):
        return None
    form = top.section("quantization_config")
    method = form.word("quant_method")
    if method == "mxfp4" and family == "gpt_oss":
        return None
    block = form.integers("weight_block_size") if form.present("weight_block_size") else ()
    if method != "fp8" or len(block) != 2 or min(block) < 1:
        raise form.fail(
            "quant_method", "only FP8 with a weight_block_size is understood in this family",
            "plan with the config.json of the BF16 release",
        )
    return block[0], block[1]


def _mixers(text: Fields, family: str, depth: int) -> tuple[OutlineMixer, ...]:
    if text.present("kv_lora_rank"):
        return (_mla(text),) * depth
    full = _gqa(text, family)
    kinds = _layer_types(text, family, depth)
    mixers: list[OutlineMixer] = []
    for kind in kinds:
        if kind == "linear_attention":
            mixers.append(_gated_delta(text))
        elif kind == "sliding_attention":
            window = text.integer("sliding_window")
            mixers.append(_gqa(text, family, window))
        else:
            mixers.append(full)
    return tuple(mixers)


def _layer_types(text: Fields, family: str, depth: int) -> tuple[str, ...]:
    """`full_attention`, `sliding_attention` or `linear_attention` per layer."""
    if text.present("layer_types"):
        names = text.words("layer_types")
        allowed = {"full_attention", "sliding_attention", "linear_attention"}
        if len(names) != depth or not set(names) <= allowed:
            raise text.fail("layer_types", f"must be {depth} of {', '.join(sorted(allowed))}")
        return names
    if text.present("linear_num_value_heads"):
        every = text.integer("full_attention_interval", default=4)
        return tuple(
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(depth)
        )
    if family == "gpt_oss":
        return tuple("full_attention" if i % 2 else "sliding_attention" for i in range(depth))
    return ("full_attention",) * depth


def _gqa(text: Fields, family: str, window: int | None = None) -> GQASpec:
    heads = text.integer("num_attention_heads")
    width = text.integer("hidden_size") // heads
    is_gpt_oss = family == "gpt_oss"
    bias = is_gpt_oss or family.startswith(_QKV_BIAS)
    return GQASpec(
        num_heads=heads,
        num_kv_heads=text.integer("num_key_value_heads", default=heads),
        head_dim=text.integer("head_dim", default=width) if text.present("head_dim") else width,
        qk_norm=family.startswith(_QK_NORM) or text.boolean("use_qk_norm", default=False),
        bias=text.boolean("attention_bias", default=bias),
        out_bias=is_gpt_oss or text.boolean("attention_out_bias", default=False),
        gate=family.startswith(("qwen3_next", "qwen3_5")),
        window=window,
        sinks=is_gpt_oss,
    )


def _gated_delta(text: Fields) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        key_heads=text.integer("linear_num_key_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_heads=text.integer("linear_num_value_heads"),
        value_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", default=4),
    )


def _mla(text: Fields) -> MLASpec:
    nope, rotated = text.integer("qk_nope_head_dim"), text.integer("qk_rope_head_dim")
    return MLASpec(
        num_heads=text.integer("num_attention_heads"),
        q_lora_rank=text.optional_integer("q_lora_rank", minimum=1),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=text.integer("v_head_dim"),
        softmax_scale=(nope + rotated) ** -0.5,
        latent_eps=1e-6,
    )


def _ffns(text: Fields, family: str, depth: int) -> tuple[DenseSpec | MoESpec, ...]:
    key = next(
        (key for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.present(key)),
        None,
    )
    if key is None:
        return (DenseSpec(text.integer("intermediate_size"), _SWIGLU),) * depth
    moe = _moe(text, family, key)
    return tuple(
        moe if _is_sparse(text, index)
        else DenseSpec(text.integer("intermediate_size"), _SWIGLU)
        for index in range(depth)
    )


def _is_sparse(text: Fields, index: int) -> bool:
    if text.present("first_k_dense_replace") and index < text.integer(
        "first_k_dense_replace", minimum=0
    ):
        return False
    if text.present("mlp_only_layers") and index in text.integers("mlp_only_layers"):
        return False
    return (index + 1) % text.integer("decoder_sparse_step", default=1) == 0


def _moe(text: Fields, family: str, experts_key: str) -> MoESpec:
    wide = "moe_intermediate_size" if text.present("moe_intermediate_size") else "intermediate_size"
    width, shared = text.integer(wide), 0
    if text.present("shared_expert_intermediate_size"):
        shared = text.integer("shared_expert_intermediate_size")
    elif text.present("n_shared_experts"):
        shared = text.integer("n_shared_experts") * width
    experts = text.integer(experts_key)
    chosen = "num_experts_per_tok" if text.present("num_experts_per_tok") else "experts_per_token"
    top_k = text.integer(chosen)
    if top_k > experts:
        raise text.fail(chosen, f"must be at most {experts_key} ({experts})")
    return MoESpec(
        num_experts=experts, top_k=top_k, intermediate_size=width,
        shared_intermediate_size=shared, activation=_SWIGLU, renormalise=True, scale=1.0,
        form="mxfp4" if family == "gpt_oss" else "plain",
    )
