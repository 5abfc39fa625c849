"""Readers take released configs and refuse what they would compute wrongly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from trimtab.arch.load import load_arch, read_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import AttnRes, DenseSpec, KDASpec, MLASpec, MoESpec, PlainResidual
from trimtab.errors import ArchError, ConfigError


def config_of(name: str = "k3-tiny") -> dict[str, Any]:
    return copy.deepcopy(preset_config(name))


def error_of(config: object) -> ArchError:
    with pytest.raises(ArchError) as caught:
        load_arch(config, "config.json")  # type: ignore[arg-type]
    return caught.value


def test_demo_model_has_the_agreed_shape() -> None:
    arch = load_arch(config_of("k3.1-tiny"))
    assert [i for i, layer in enumerate(arch.layers) if isinstance(layer.mixer, MLASpec)] == [3, 7]
    kda, mla = arch.layers[0].mixer, arch.layers[3].mixer
    assert isinstance(kda, KDASpec) and isinstance(mla, MLASpec)
    assert (kda.num_heads, kda.head_dim, kda.gate_lower_bound, kda.gate_rank) == (4, 32, -5, None)
    assert mla.gate == "channel" and mla.latent_eps == 1e-6 and mla.softmax_scale == 48**-0.5
    assert mla.indexer is not None
    assert (mla.indexer.heads, mla.indexer.dim, mla.indexer.top_k) == (8, 16, 64)
    assert mla.indexer.norm_eps == arch.norm_eps and mla.indexer.rope_layout is None
    assert isinstance(arch.layers[0].ffn, DenseSpec)
    moe = arch.layers[1].ffn
    assert isinstance(moe, MoESpec) and moe.latent is not None
    assert (moe.num_experts, moe.top_k, moe.latent.size, moe.form) == (64, 8, 32, "mxfp4")
    assert moe.shared_intermediate_size == 3 * moe.intermediate_size
    assert arch.residual == AttnRes(4, 1e-5)
    vision = arch.vision
    assert vision is not None and arch.image_token_id == 267
    assert (vision.num_layers, vision.head_dim, vision.merged_size) == (2, 20, 160)


def test_kimi_linear_has_the_older_forms() -> None:
    arch = load_arch(config_of("kimi-linear-48b"))
    kda, mla = arch.layers[0].mixer, arch.layers[26].mixer
    assert isinstance(kda, KDASpec) and kda.gate_lower_bound is None and kda.gate_rank == 128
    assert isinstance(mla, MLASpec) and mla.q_lora_rank is None and mla.gate is None
    assert mla.latent_eps == 1e-6 and isinstance(arch.residual, PlainResidual)
    assert arch.max_position_embeddings == 1048576


def test_transformers_spelling_gives_the_same_layers() -> None:
    released = config_of("kimi-linear-tiny")
    flat = config_of("kimi-linear-tiny")
    linear = flat.pop("linear_attn_config")
    flat["layer_types"] = [
        "full_attention" if i + 1 in linear["full_attn_layers"] else "linear_attention"
        for i in range(8)
    ]
    flat["mlp_layer_types"] = ["dense"] + ["sparse"] * 7
    del flat["first_k_dense_replace"]
    flat |= {"linear_num_heads": 4, "linear_head_dim": 32, "linear_conv_kernel_dim": 4}
    assert load_arch(flat).layers == load_arch(released).layers


def test_float32_config_stores_float32() -> None:
    config = config_of("kimi-linear-tiny")
    config["dtype"] = "float32"
    assert load_arch(config).dtype == "F32"


def test_dsa_config_may_stand_at_the_top_level() -> None:
    inside = config_of("k3.1-tiny")
    outside = config_of("k3.1-tiny")
    outside["dsa_config"] = outside["text_config"].pop("dsa_config")
    assert load_arch(outside) == load_arch(inside)
    assert load_arch(inside).name == "Kimi K3.1"


def test_vision_is_read_and_supported() -> None:
    arch = load_arch(config_of("kimi-k3"))
    assert arch.vision is not None and arch.vision.num_layers == 27
    assert arch.vision.norm_eps == 2.0**-23 and arch.vision.head_dim == 128
    assert arch.vision.num_tokens((1, 152, 408)) == 15504
    assert arch.unsupported == ()
    assert "text_config.top_k" in arch.ignored and "ignore_index" in arch.ignored


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "128", "whole number"),
        ("hidden_size", True, "whole number"),
        ("hidden_size", 0, "at least 1"),
        ("rms_norm_eps", None, "positive number"),
        ("mla_use_output_gate", 1, "true or false"),
        ("hidden_act", "gelu", "one of silu, situ"),
        ("dtype", "float16", "one of bfloat16, float32"),
        ("linear_attn_config", [], "an object"),
        ("num_experts_per_token", 65, "at most the experts"),
        ("moe_router_activation_func", "softmax", "sigmoid"),
        ("mla_use_nope", False, "rotary"),
        ("moe_intermediate_size", 48, "multiple of 32"),
        ("routed_expert_hidden_size", 48, "multiple of 32"),
        ("num_expert_group", 7, "must divide the 64 routed experts"),
        ("num_expert_group", 64, "groups of two or more"),
    ],
)
def test_a_bad_field_is_named_with_path_value_and_rule(key: str, value: object, words: str) -> None:
    config = config_of()
    config["text_config"][key] = value
    error = error_of(config)
    assert error.code == "TT202" and error.exit_code == 2
    assert error.where == f"config.json: text_config.{key}"
    assert words in error.rule


def test_a_missing_field_is_named() -> None:
    config = config_of()
    del config["text_config"]["kv_lora_rank"]
    error = error_of(config)
    assert (error.code, error.where) == ("TT202", "config.json: text_config.kv_lora_rank")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("text_config", "attn_res_blok_size"),
        ("text_config", "logit_scale"),
        (None, "sliding_window"),
        ("linear_attn_config", "gate_upper_bound"),
        ("dsa_config", "index_kpool"),
    ],
)
def test_an_unknown_field_is_an_error(section: str | None, key: str) -> None:
    config = config_of("k3.1-tiny")
    target = config if section is None else config["text_config"]
    if section not in (None, "text_config"):
        target = target[section]
    target[key] = 1
    error = error_of(config)
    assert error.code == "TT203" and error.where.endswith(key)


def test_an_unknown_field_suggests_the_known_one() -> None:
    config = config_of()
    config["text_config"]["num_experts_per_tokn"] = 8
    assert error_of(config).hint == "did you mean `num_experts_per_token`?"


def test_k3_fields_are_unknown_to_kimi_linear() -> None:
    config = config_of("kimi-linear-tiny")
    config["attn_res_block_size"] = 4
    assert error_of(config).code == "TT203"
    config = config_of("kimi-linear-tiny")
    config["linear_attn_config"]["gate_lower_bound"] = -5.0
    assert error_of(config).code == "TT203"


@pytest.mark.parametrize("lists", [([1, 2, 3], [4]), ([0, 1, 2, 4, 5, 6], [3, 7]),
                                   ([1, 2, 3, 4, 5, 6, 7], [4, 8])])
def test_layer_lists_must_name_each_layer_once(lists: tuple[list[int], list[int]]) -> None:
    config = config_of()
    linear = config["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = lists
    error = error_of(config)
    assert error.code == "TT202" and "exactly once" in error.rule


def test_an_unknown_model_type_is_answered_with_the_nearest() -> None:
    error = error_of({"model_type": "kimi_k4"})
    assert error.code == "TT201" and error.hint == "did you mean `kimi_k3`?"
    assert error_of({"model_type": 3}).code == "TT202"
    assert error_of([]).code == "TT202"


def test_another_quantization_is_refused() -> None:
    config = config_of()
    config["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"
    assert error_of(config).where.endswith("quantization_config.format")


def test_files_and_directories_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as missing:
        read_arch(tmp_path / "none")
    assert missing.value.code == "TT107"
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "kimi_k3",\n oops}')
    with pytest.raises(ArchError) as broken:
        read_arch(tmp_path)
    assert broken.value.code == "TT204" and broken.value.where.endswith("config.json:2")


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ArchError) as caught:
        preset_config("kimi-k31")
    assert caught.value.code == "TT201" and caught.value.hint == "did you mean `kimi-k3.1`?"
