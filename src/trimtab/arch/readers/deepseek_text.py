"""The text model shared by DeepSeek-V3, DeepSeek-V3.2 and GLM-5: rotated MLA, grouped routing.

Knows: the field names of the common part, YaRN, MTP layers. Does not know: what one family has and
the others lack, such as a schedule of shared indexers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trimtab.arch.readers import kimi_text
from trimtab.arch.readers.fields import Fields
from trimtab.arch.readers.quantization import read_quantization
from trimtab.arch.spec import (
    ActivationSpec,
    ArchSpec,
    DenseSpec,
    IndexerSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    PlainResidual,
    RopeSpec,
)

NOISE = kimi_text.NOISE | {
    "aux_loss_alpha", "ep_size", "index_share_for_mtp_iteration", "moe_router_dtype", "seq_aux",
}
# Of the index keys' LayerNorm; the released code never hands it rms_norm_eps.
INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Family:
    """What tells the families apart.

    Args:
        model_type: of config.json, and the name of the weight map.
        name: what users call it.
        sparse: has an indexer.
        indexer_interleaved: layout of the indexer's rotation where the config does not say.
    """

    model_type: str
    name: str
    sparse: bool = True
    indexer_interleaved: bool = False


def read_model(text: Fields, family: Family, shares: tuple[str, ...] | None = None) -> ArchSpec:
    """Read the whole model.

    Args:
        text: the config.
        family: which one it is.
        shares: `full` or `shared` per layer; None runs an indexer in every layer.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    text.expect("model_type", family.model_type, "this reader knows one family")
    text.choice("hidden_act", ("silu",), default="silu")
    text.expect("mlp_bias", False, "projections have no bias")
    depth = text.integer("num_hidden_layers")
    activation = ActivationSpec("swiglu")
    mla = read_mla(text)
    if family.sparse:
        mla = replace(mla, indexer=_read_indexer(text, mla, family.indexer_interleaved))
        _check_layer_types(text, depth)
    dense = DenseSpec(text.integer("intermediate_size"), activation)
    moe = read_moe(text, activation)
    sparse_ffn = kimi_text.moe_layers(text, depth)
    layers = tuple(
        LayerSpec(_shared(mla, share), moe if is_moe else dense)
        for share, is_moe in zip(shares or ("full",) * depth, sparse_ffn, strict=True)
    )
    mtp = text.integer("num_nextn_predict_layers", minimum=0, default=0)
    return ArchSpec(
        family=family.model_type,
        name=family.name,
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        layers=layers,
        residual=PlainResidual(),
        norm_eps=text.number("rms_norm_eps", positive=True),
        max_position_embeddings=text.integer("max_position_embeddings"),
        dtype=kimi_text.read_dtype(text),
        tie_word_embeddings=text.boolean("tie_word_embeddings", default=False),
        bos_token_id=kimi_text.read_token_id(text, "bos_token_id"),
        eos_token_id=text.first_integer("eos_token_id"),
        pad_token_id=kimi_text.read_token_id(text, "pad_token_id"),
        quantization=read_quantization(text),
        mtp=(LayerSpec(mla, moe),) * mtp,
        ignored=text.finish(NOISE),
    )


def _shared(mla: MLASpec, share: str) -> MLASpec:
    if share == "full" or mla.indexer is None:
        return mla
    return replace(mla, indexer=replace(mla.indexer, share="shared"))


def _check_layer_types(text: Fields, depth: int) -> None:
    if text.present("layer_types"):
        names = text.words("layer_types")
        allowed = {"deepseek_sparse_attention", "indexed_attention"}
        if len(names) != depth or not set(names) <= allowed:
            raise text.fail("layer_types", f"must be {depth} of {', '.join(sorted(allowed))}")


def read_mla(text: Fields) -> MLASpec:
    """Multi-head latent attention with a rotated slice."""
    text.expect("attention_bias", False, "projections have no bias")
    if text.present("attention_dropout") and text.number("attention_dropout") != 0:
        raise text.fail("attention_dropout", "must be 0")
    heads = text.integer("num_attention_heads")
    if text.present("num_key_value_heads"):
        text.expect("num_key_value_heads", heads, "latent attention has as many as queries")
    nope, rotated = text.integer("qk_nope_head_dim"), text.integer("qk_rope_head_dim")
    if rotated % 2:
        raise text.fail("qk_rope_head_dim", "must be even: the rotation turns pairs")
    rope, scale = read_rope(text)
    return MLASpec(
        num_heads=heads,
        q_lora_rank=text.optional_integer("q_lora_rank", minimum=1),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=text.integer("v_head_dim"),
        softmax_scale=(nope + rotated) ** -0.5 * scale,
        latent_eps=kimi_text.LATENT_EPS,
        rope=rope,
    )


def read_rope(text: Fields) -> tuple[RopeSpec, float]:
    """Rotary embedding, and the factor that YaRN puts on the softmax scale.

    Read from `rope_parameters`, or from the older `rope_theta` with `rope_scaling`.
    """
    layout = "interleaved" if text.boolean("rope_interleave", default=True) else "half"
    plain = RopeSpec(10000.0, "half" if layout == "half" else "interleaved")
    key = "rope_parameters" if text.present("rope_parameters") else "rope_scaling"
    if not text.present(key):
        return replace(plain, theta=text.number("rope_theta", positive=True)), 1.0
    fields = text.section(key)
    owner = fields if fields.present("rope_theta") else text
    plain = replace(plain, theta=owner.number("rope_theta", positive=True))
    kind_key = "rope_type" if fields.present("rope_type") else "type"
    kind = fields.choice(kind_key, ("default", "yarn"), default="default")
    if kind == "default":
        fields.finish(("rope_type", "type"))
        return plain, 1.0
    return _read_yarn(fields, plain)


def _read_yarn(fields: Fields, plain: RopeSpec) -> tuple[RopeSpec, float]:
    factor = fields.number("factor", positive=True)
    numerator = fields.number("mscale", default=1.0)
    denominator = fields.number("mscale_all_dim", default=0.0)
    fields.expect("truncate", True, "the borders of the ramp are whole channels")
    rope = replace(
        plain,
        yarn_factor=factor,
        yarn_original=fields.integer("original_max_position_embeddings"),
        yarn_beta_fast=fields.number("beta_fast", default=32.0, positive=True),
        yarn_beta_slow=fields.number("beta_slow", default=1.0, positive=True),
        amplitude=yarn_mscale(factor, numerator) / yarn_mscale(factor, denominator),
    )
    fields.finish(("rope_type", "type"))
    return rope, yarn_mscale(factor, denominator) ** 2


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 weight ln(factor) + 1, the growth of attention scores that YaRN makes up for.

    >>> round(yarn_mscale(40.0, 1.0) ** 2, 5)
    1.87385
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _read_indexer(text: Fields, mla: MLASpec, interleaved: bool) -> IndexerSpec:
    dim = text.integer("index_head_dim")
    if dim < mla.qk_rope_head_dim:
        raise text.fail("index_head_dim", "must be at least qk_rope_head_dim")
    turned = text.boolean("indexer_rope_interleave", default=interleaved)
    return IndexerSpec(
        heads=text.integer("index_n_heads"),
        dim=dim,
        top_k=text.integer("index_topk"),
        rope_layout="interleaved" if turned else "half",
        norm_eps=INDEX_NORM_EPS,
    )


def read_moe(text: Fields, activation: ActivationSpec) -> MoESpec:
    """Sigmoid router with selection bias and groups, routed experts and one fused shared expert.

    Raises:
        ArchError: more experts chosen than there are, or groups that do not divide them.
    """
    text.expect("scoring_func", "sigmoid", "the router score is a sigmoid")
    text.expect("topk_method", "noaux_tc", "selection adds a bias that carries no weight")
    experts, top_k = text.integer("n_routed_experts"), text.integer("num_experts_per_tok")
    if text.present("num_experts"):
        text.expect("num_experts", experts, "it repeats n_routed_experts")
    width = text.integer("moe_intermediate_size")
    groups, kept = kimi_text.read_groups(text, "n_group", experts)
    if top_k > experts // groups * kept:
        raise text.fail("num_experts_per_tok", "must be at most the experts of the kept groups")
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=text.integer("n_shared_experts", minimum=0, default=0) * width,
        activation=activation,
        renormalise=text.boolean("norm_topk_prob"),
        scale=text.number("routed_scaling_factor", default=1.0, positive=True),
        groups=groups,
        topk_groups=kept,
    )
