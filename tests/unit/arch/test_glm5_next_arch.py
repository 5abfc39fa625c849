"""GLM-5.3-Flash: spellings of its config, published numbers of its files, what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

from trimtab.arch import maps
from trimtab.arch.cache import cache_specs
from trimtab.arch.load import load_arch
from trimtab.arch.params import inventory
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import AxialVisionSpec, HyperConnections, KDASpec, MLASpec, MoESpec
from trimtab.arch.summary import summarise
from trimtab.errors import ArchError

RELEASED = "glm-5.3-flash"
# Bytes per kind of module of the released FP8 files, from their headers: KDA, mixing weights,
# routers, tower with merger, latent attention with indexers, routed experts.
KDA, HYPER, ROUTERS, VISION = 9_366_356_992, 70_788_600, 99_138_816, 1_127_254_016
SPARSE, EXPERTS = 1_641_091_584, 304_480_124_928


def config_of(name: str = "glm5-next-tiny") -> dict[str, Any]:
    return copy.deepcopy(preset_config(name))


def error_of(config: dict[str, Any]) -> ArchError:
    with pytest.raises(ArchError) as caught:
        load_arch(config, "config.json")
    return caught.value


def transformers_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers writes it."""
    text = config["text_config"]
    linear = text.pop("linear_attn_config")
    for key in ("mhc", "first_k_dense_replace", "index_kpool_compress", "indexer_rope_interleave",
                "index_share_for_mtp_iteration", "scoring_func", "topk_method", "moe_router_dtype",
                "mla_use_nope", "num_nextn_predict_layers"):
        text.pop(key, None)
    text["layer_types"] = [
        name.replace("deepseek_sparse", "indexed") for name in text["layer_types"]
    ]
    return {**config, "text_config": {
        **text, "linear_head_dim": linear["head_dim"], "linear_num_heads": linear["num_heads"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "linear_lower_bound": linear["gate_lower_bound"], "head_dim": 0,
        "router_aux_loss_coef": 0.001, "_name_or_path": "",
    }}


def test_the_released_model_has_its_published_sizes() -> None:
    arch = load_arch(config_of(RELEASED))
    summary = summarise(arch)
    assert summary.total_parameters == 313_890_438_974
    stored = {owner.owner: owner.stored_bytes for owner in summary.owners}
    assert stored["kda"] == KDA
    assert stored["residual"] == HYPER
    assert stored["router"] == ROUTERS
    assert stored["vision"] + stored["projector"] == VISION
    assert stored["mla"] + stored["indexer"] == SPARSE
    assert stored["routed_expert"] == EXPERTS
    assert summary.mtp is not None
    assert summary.mtp.layers == (45,) and summary.mtp.stored_bytes == 7_493_399_168
    assert summary.num_tensors + summary.mtp.num_tensors == 76_108
    assert summary.stored_bytes + summary.mtp.stored_bytes == 328_326_771_576
    kinds = Counter(type(layer.mixer) for layer in arch.layers)
    assert kinds == {KDASpec: 34, MLASpec: 11}
    assert [i for i, layer in enumerate(arch.layers) if isinstance(layer.mixer, MLASpec)] == list(
        range(3, 45, 4)
    )
    assert sum(isinstance(layer.ffn, MoESpec) for layer in arch.layers) == 42
    assert summary.kv_bytes_per_token == 11 * 2 * (512 + 128 // 4)


def test_the_parts_of_the_model_are_read() -> None:
    arch = load_arch(config_of(RELEASED))
    assert arch.residual == HyperConnections(4, 20, 1e-6, 1e-5)
    mla = arch.layers[3].mixer
    assert isinstance(mla, MLASpec) and mla.indexer is not None
    assert (mla.latent_eps, mla.softmax_scale, mla.rope) == (1e-5, 256**-0.5, None)
    index = mla.indexer
    assert (index.top_k, index.pool, index.always_select_tail, index.norm_eps) == (2048, 4, True, 1e-6)
    kda = arch.layers[0].mixer
    assert isinstance(kda, KDASpec)
    assert (kda.gate_lower_bound, kda.decay_rank, kda.dtype, kda.conv_dtype) == (-5, 128, "F32", "BF16")
    moe = arch.layers[44].ffn
    assert isinstance(moe, MoESpec)
    assert (moe.num_experts, moe.top_k, moe.scale, moe.activation.clamp) == (288, 8, 2.5, 10)
    assert isinstance(arch.vision, AxialVisionSpec)
    assert (arch.image_token_id, arch.video_span) == (154854, (154832, 154833))
    assert arch.vision.num_tokens((3, 4, 6)) == 18


@pytest.mark.parametrize("name", [RELEASED, "glm5-next-tiny"])
def test_both_spellings_are_the_same_model(name: str) -> None:
    released, written = load_arch(config_of(name)), load_arch(transformers_spelling(config_of(name)))
    assert written.layers == released.layers
    assert inventory(written) == inventory(released)
    assert written.residual == released.residual


@pytest.mark.parametrize("flat", [False, True])
def test_a_text_only_checkpoint_has_no_tower(flat: bool) -> None:
    config = config_of()
    full = {p.name for p in inventory(load_arch(config))}
    text = config["text_config"] if flat else {**config, "vision_config": None}
    arch = load_arch(text)
    assert arch.vision is None
    assert full - {p.name for p in inventory(arch)} == {
        name for name in full if name.startswith(("vision.", "projector."))
    }


def test_float32_checkpoints_store_everything_so() -> None:
    config = config_of()
    config["dtype"] = "float32"
    assert {p.dtype for p in inventory(load_arch(config))} == {"F32"}


def test_released_names_are_those_of_the_files() -> None:
    tensors = {t.name: t for t in maps.stored_tensors(load_arch(config_of()))}
    layer = "model.language_model.layers.3."
    expected = {
        layer + "hc_attn_fn": ((24, 512), "BF16"),
        layer + "hc_ffn_base": ((24,), "F32"),
        layer + "hc_ffn_scale": ((3,), "F32"),
        layer + "self_attn.indexer.index_kpool_compress_ape": ((4, 16), "BF16"),
        layer + "self_attn.indexer.index_kpool_compress_gate": ((16, 128), "BF16"),
        layer + "mlp.gate.e_score_correction_bias": ((64,), "F32"),
        layer + "mlp.experts.63.up_proj.weight": ((32, 128), "BF16"),
        "model.language_model.layers.0.self_attn.dt_bias": ((128,), "F32"),
        "model.language_model.layers.0.self_attn.q_conv1d.weight": ((128, 1, 4), "BF16"),
        "model.language_model.layers.0.self_attn.o_norm.weight": ((32,), "BF16"),
        "model.visual.downsample.weight": ((128, 64, 2, 2), "BF16"),
        "model.visual.blocks.1.attn.qkv.bias": ((192,), "BF16"),
        "model.visual.merger.post_projection_norm.bias": ((128,), "BF16"),
        "lm_head.weight": ((320, 128), "BF16"),
    }
    assert {name: (tensors[name].shape, tensors[name].dtype) for name in expected} == expected


def test_module_names_are_those_of_transformers() -> None:
    names = maps.module_names(load_arch(config_of()))
    layer = "model.language_model.layers."
    assert names["layers.0.self_attn.f_a_proj"] == layer + "0.self_attn.forget_gate.f_a_proj"
    assert names["layers.3.mlp.shared_experts.up_proj"] == layer + "3.mlp.shared_experts.up_proj"
    assert names["projector.down_proj"] == "model.visual.merger.down_proj"
    assert not any("hc_" in name or "kpool" in name for name in names)


def test_pools_keep_a_tail_per_sequence() -> None:
    spec = cache_specs(load_arch(config_of()))[3]
    assert spec.bytes_per_token == 2 * (32 + 16 // 4)
    assert spec.bytes_per_sequence == 2 * 2 * 16 * 3


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("text_config", "layer_types", ["linear_attention"] * 7, "must be 8"),
        ("text_config", "layer_types", ["sliding_attention"] * 8, "must be 8 of"),
        ("text_config", "index_topk", 62, "multiple of index_kpool"),
        ("text_config", "qk_rope_head_dim", 16, "one form"),
        ("text_config", "mhc", False, "hyper-connections"),
        ("text_config", "indexer_types", ["full"] * 3 + ["shared"] * 5, "no selection to share"),
        ("text_config", "first_k_dense_replace", 2, None),
        ("text_config", "num_experts_per_tok", 65, "at most the experts"),
        ("text_config", "scoring_func", "softmax", "sigmoid"),
        ("vision_config", "out_hidden_size", 64, "text model"),
        ("vision_config", "attention_bias", False, "bias"),
        ("vision_config", "hidden_size", 66, "multiple of 4"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    section: str, key: str, value: object, words: str | None
) -> None:
    config = config_of()
    config[section][key] = value
    error = error_of(config)
    assert error.code == "TT202"
    assert words is None or words in error.rule


def test_lists_that_contradict_the_schedule_are_refused() -> None:
    config = config_of()
    config["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 3, 5, 6, 7]
    error = error_of(config)
    assert error.where.endswith("linear_attn_config.kda_layers")
    assert "counted from 0" in error.rule


def test_an_unknown_field_is_refused() -> None:
    config = config_of()
    config["text_config"]["index_kpool_stride"] = 2
    assert error_of(config).code == "TT203"
