"""The text model shared by Kimi K3 and Kimi Linear: KDA and MLA layers, dense and MoE FFNs.

Knows: the field names of the common part. Does not know: what one family has and the other lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import (
    ActivationSpec,
    DenseSpec,
    FloatType,
    IndexerSpec,
    KDASpec,
    LatentSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
)

# Class default of the latent norms: the released code never hands them rms_norm_eps.
LATENT_EPS = 1e-6

# Serialisation defaults of generation and of the configuration class.
NOISE = frozenset({
    "_attn_implementation", "_name_or_path", "add_cross_attention", "architectures", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "prefix", "pretraining_tp", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
    # Derived widths of the configuration class, and rotary fields of a model without rotation.
    "head_dim", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta",
})


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which layers are linear attention and which have experts."""

    is_linear: tuple[bool, ...]
    is_moe: tuple[bool, ...]


def read_dtype(*places: Fields) -> FloatType:
    """Stored float dtype from `dtype` (or the older `torch_dtype`) of the first place that has it.

    Raises:
        ArchError: neither bfloat16 nor float32 (TT202).
    """
    found = [
        fields.choice(key, ("bfloat16", "float32"))
        for fields in places
        for key in ("dtype", "torch_dtype")
        if fields.present(key)
    ]
    return "F32" if found and found[0] == "float32" else "BF16"


def read_token_id(fields: Fields, key: str) -> int | None:
    """A special token id, None where the config has none."""
    return fields.optional_integer(key, minimum=0)


def read_schedule(text: Fields) -> Schedule:
    """Layer kinds from the 1-based lists of `linear_attn_config`, or from `layer_types`.

    Raises:
        ArchError: the lists do not name each layer exactly once, or contradict `layer_types`.
    """
    depth = text.integer("num_hidden_layers")
    linear = _linear_from_lists(text, depth)
    if text.present("layer_types"):
        names = text.words("layer_types")
        allowed = {"linear_attention", "full_attention"}
        if len(names) != depth or not set(names) <= allowed:
            raise text.fail("layer_types", f"must be {depth} of {', '.join(sorted(allowed))}")
        named = tuple(name == "linear_attention" for name in names)
        if linear is not None and linear != named:
            raise text.fail("layer_types", "contradicts the layer lists of linear_attn_config")
        linear = named
    if linear is None:
        raise text.fail(
            "linear_attn_config", "must have kda_layers and full_attn_layers",
            hint="class defaults are not those of the released checkpoints, so none is assumed",
        )
    return Schedule(linear, moe_layers(text, depth))


def _linear_from_lists(text: Fields, depth: int) -> tuple[bool, ...] | None:
    if not text.present("linear_attn_config"):
        return None
    section = text.section("linear_attn_config")
    if not (section.present("kda_layers") and section.present("full_attn_layers")):
        return None
    kda = section.integers("kda_layers")
    full = section.integers("full_attn_layers")
    if sorted(kda + full) != list(range(1, depth + 1)):
        raise section.fail(
            "kda_layers", "with full_attn_layers must name each layer "
            f"from 1 to {depth} (num_hidden_layers) exactly once",
        )
    return tuple(index + 1 in set(kda) for index in range(depth))


def moe_layers(text: Fields, depth: int) -> tuple[bool, ...]:
    """Which layers have experts, from `mlp_layer_types` or `first_k_dense_replace`.

    Raises:
        ArchError: the two contradict each other.
    """
    text.expect("moe_layer_freq", 1, "every layer after the dense ones has experts")
    if text.present("mlp_layer_types"):
        names = text.words("mlp_layer_types")
        if len(names) != depth or not set(names) <= {"dense", "sparse"}:
            raise text.fail("mlp_layer_types", f"must be {depth} of dense, sparse")
        moe = tuple(name == "sparse" for name in names)
        if text.present("first_k_dense_replace"):
            first = text.integer("first_k_dense_replace", minimum=0)
            if moe != tuple(index >= first for index in range(depth)):
                raise text.fail("mlp_layer_types", f"contradicts first_k_dense_replace {first}")
        return moe
    first = text.integer("first_k_dense_replace", minimum=0)
    return tuple(index >= first for index in range(depth))


def read_kda(text: Fields, norm_eps: float, extra: tuple[str, ...] = ()) -> KDASpec:
    """KDA from `linear_attn_config`, or from the `linear_*` fields that transformers writes.

    Args:
        text: the text config.
        norm_eps: of the gated output norm.
        extra: keys of `linear_attn_config` that this family has, of `gate_lower_bound` and
            `use_full_rank_gate`; elsewhere they are unknown fields.
    """
    bound: float | None = None
    full_rank = False
    flat = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if text.present("linear_attn_config"):
        section = text.section("linear_attn_config")
        heads, dim = section.integer("num_heads"), section.integer("head_dim")
        conv = section.integer("short_conv_kernel_size")
        if "gate_lower_bound" in extra:
            bound = section.optional_number("gate_lower_bound")
            if bound is not None and bound >= 0:
                raise section.fail("gate_lower_bound", "must be negative; it is a log decay")
        if "use_full_rank_gate" in extra:
            full_rank = section.boolean("use_full_rank_gate", default=False)
        section.finish(("kda_layers", "full_attn_layers"))
        text.skip(*flat)
    else:
        heads, dim, conv = (text.integer(key) for key in flat)
    return KDASpec(
        num_heads=heads, head_dim=dim, conv_kernel=conv, gate_lower_bound=bound,
        decay_rank=dim, gate_rank=None if full_rank else dim, norm_eps=norm_eps,
    )


def read_mla(text: Fields, *, gated: bool, indexer: IndexerSpec | None) -> MLASpec:
    """Unrotated multi-head latent attention."""
    text.expect("mla_use_nope", True, "rotary position embedding is not part of this family")
    text.expect("attention_bias", False, "projections have no bias")
    heads = text.integer("num_attention_heads")
    # Absorbed MLA has one key head, expanded MLA as many as queries; both describe the same layer.
    if text.present("num_key_value_heads") and text.integer("num_key_value_heads") not in (1, heads):
        raise text.fail("num_key_value_heads", f"must be num_attention_heads ({heads}) or 1")
    if text.present("attention_dropout"):
        rate = text.number("attention_dropout")
        if rate != 0:
            raise text.fail("attention_dropout", "must be 0")
    nope, rope = text.integer("qk_nope_head_dim"), text.integer("qk_rope_head_dim", minimum=0)
    return MLASpec(
        num_heads=heads,
        q_lora_rank=text.optional_integer("q_lora_rank", minimum=1),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=text.integer("v_head_dim"),
        softmax_scale=(nope + rope) ** -0.5,
        latent_eps=LATENT_EPS,
        gate="channel" if gated else None,
        indexer=indexer,
    )


def read_moe(
    text: Fields, activation: ActivationSpec, latent: LatentSpec | None
) -> MoESpec:
    """Sigmoid router with selection bias, routed experts and one fused shared expert.

    Raises:
        ArchError: more experts chosen than there are, or groups that do not divide them.
    """
    text.expect("moe_router_activation_func", "sigmoid", "the router score is a sigmoid")
    text.expect("topk_method", "noaux_tc", "selection adds a bias that carries no weight")
    experts, top_k = text.integer("num_experts"), text.integer("num_experts_per_token")
    width = text.integer("moe_intermediate_size")
    groups, kept = read_groups(
        text, "num_expert_group", experts, used=text.boolean("use_grouped_topk", default=True)
    )
    if top_k > experts // groups * kept:
        raise text.fail("num_experts_per_token", "must be at most the experts of the kept groups")
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=text.integer("num_shared_experts", minimum=0, default=0) * width,
        activation=activation,
        renormalise=text.boolean("moe_renormalize"),
        scale=text.number("routed_scaling_factor", default=1.0, positive=True),
        groups=groups,
        topk_groups=kept,
        latent=latent,
    )


def read_groups(text: Fields, key: str, experts: int, *, used: bool = True) -> tuple[int, int]:
    """Groups of experts, and how many of them a token keeps.

    Args:
        text: the text config.
        key: its field with the number of groups.
        experts: number of routed experts.
        used: whether the config groups them at all.

    Raises:
        ArchError: groups that do not divide the experts, or hold fewer than the two whose scores
            are the group's, or fewer groups than are kept.
    """
    groups, kept = text.integer(key, default=1), text.integer("topk_group", default=1)
    if not used:
        return 1, 1
    if experts % groups or kept > groups or (groups > 1 and experts // groups < 2):
        raise text.fail(key, f"must divide the {experts} routed experts into groups of two or more, "
                        f"of which topk_group ({kept}) are kept")
    return groups, kept


def build_layers(
    schedule: Schedule, kda: KDASpec, mla: MLASpec, dense: DenseSpec, moe: MoESpec
) -> tuple[LayerSpec, ...]:
    """One LayerSpec per layer; layers of a kind share their specs."""
    return tuple(
        LayerSpec(kda if linear else mla, moe if sparse else dense)
        for linear, sparse in zip(schedule.is_linear, schedule.is_moe, strict=True)
    )


def read_mtp(text: Fields) -> tuple[str, ...]:
    """Features that are not supported: multi-token prediction layers."""
    count = text.integer("num_nextn_predict_layers", minimum=0, default=0)
    return (f"multi-token prediction ({count} layers)",) if count else ()
