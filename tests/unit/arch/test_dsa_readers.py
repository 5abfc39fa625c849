"""Readers, weight map and stored forms of DeepSeek-V3, DeepSeek-V3.2, GLM-5 and Kimi K2."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from trimtab.arch import maps
from trimtab.arch.cache import cache_specs
from trimtab.arch.load import load_arch, require_readable
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import ArchSpec, MLASpec, MoESpec
from trimtab.arch.summary import Summary, summarise
from trimtab.errors import ArchError


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(preset_config(name))
    return config | changes


def arch_of(name: str, **changes: Any) -> ArchSpec:
    return load_arch(config_of(name, **changes), name)


def mla_of(arch: ArchSpec, layer: int = 0) -> MLASpec:
    mixer = arch.layers[layer].mixer
    assert isinstance(mixer, MLASpec)
    return mixer


def shares(arch: ArchSpec) -> str:
    found = [mla_of(arch, index).indexer for index in range(arch.num_layers)]
    return "".join("-" if i is None else i.share[0].upper() for i in found)


def whole_release(summary: Summary) -> tuple[int, int]:
    """Bytes and tensors of the files, multi-token prediction included."""
    assert summary.mtp is not None
    return (
        summary.stored_bytes + summary.mtp.stored_bytes,
        summary.num_tensors + summary.mtp.num_tensors,
    )


def test_deepseek_v32_as_released() -> None:
    arch = arch_of("deepseek-v3.2")
    mla, ffn = mla_of(arch), arch.layers[3].ffn
    assert mla.rope is not None and mla.indexer is not None and isinstance(ffn, MoESpec)
    assert (mla.rope.layout, mla.rope.yarn_factor, mla.rope.amplitude) == ("interleaved", 40.0, 1.0)
    assert mla.softmax_scale * 192**0.5 == pytest.approx(1.87385, abs=1e-5)
    assert (mla.latent_eps, arch.norm_eps, mla.indexer.norm_eps) == (1e-6, 1e-6, 1e-6)
    assert (mla.indexer.heads, mla.indexer.dim, mla.indexer.top_k) == (64, 128, 2048)
    assert mla.indexer.rope_layout == "half" and shares(arch) == "F" * 61
    assert (ffn.groups, ffn.topk_groups, ffn.scale, ffn.renormalise) == (8, 4, 2.5, True)
    assert [layer.ffn == ffn for layer in arch.layers] == [False] * 3 + [True] * 58


def test_glm_5_3_as_released() -> None:
    arch = arch_of("glm-5.3")
    mla = mla_of(arch)
    assert mla.rope is not None and mla.indexer is not None
    assert (mla.rope.theta, mla.rope.yarn_factor, mla.softmax_scale) == (8e6, None, 1 / 16)
    assert mla.indexer.rope_layout == "interleaved"
    assert (mla.latent_eps, arch.norm_eps) == (1e-6, 1e-5)
    assert shares(arch) == "FFF" + "SSSF" * 18 + "SSS"
    assert arch.eos_token_id == 154820


def test_a_shared_layer_has_neither_indexer_tensors_nor_index_keys() -> None:
    arch = arch_of("glm-5-tiny")
    names = [tensor.name for tensor in maps.stored_tensors(arch)]
    with_indexer = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert with_indexer == {0, 1, 2, 6}
    assert [cache.index_dim > 0 for cache in cache_specs(arch)] == [
        letter == "F" for letter in shares(arch)
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"indexer_types": None}, "FFFSSSF"),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 2}, "FFSFSFS"),
        ({"indexer_types": None, "index_topk_freq": None}, "FFFFFFF"),
        ({"indexer_types": None, "index_topk_pattern": "FSSFSSS"}, "FSSFSSS"),
    ],
)
def test_the_schedule_of_indexers(fields: dict[str, Any], expected: str) -> None:
    assert shares(arch_of("glm-5-tiny", **fields)) == expected


@pytest.mark.parametrize(
    ("name", "fields", "where"),
    [
        ("glm-5-tiny", {"index_topk_freq": 2}, "indexer_types"),
        ("glm-5-tiny", {"indexer_types": None, "index_topk_pattern": "SFFFFFF"}, "index_topk_pattern"),
        ("glm-5-tiny", {"indexer_types": None, "index_topk_pattern": "FF"}, "index_topk_pattern"),
        ("glm-5-tiny", {"num_experts": 31}, "num_experts"),
        ("deepseek-v3.2-tiny", {"n_group": 5}, "n_group"),
        ("deepseek-v3.2-tiny", {"n_group": 32}, "n_group"),
        ("deepseek-v3.2-tiny", {"topk_group": 1, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("deepseek-v3.2-tiny", {"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ("deepseek-v3.2-tiny", {"index_head_dim": 8}, "index_head_dim"),
        ("deepseek-v3.2-tiny", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek-v3.2-tiny", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type"),
        ("deepseek-v3.2-tiny", {"q_lora": 3}, "q_lora"),
    ],
)
def test_what_would_compute_something_else_is_an_error(
    name: str, fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(ArchError) as caught:
        arch_of(name, **fields)
    assert caught.value.where.endswith(f": {where}")


def test_rope_in_the_spelling_that_transformers_saves() -> None:
    config = config_of("deepseek-v3.2-tiny")
    old = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    config["rope_parameters"] = {**old, "rope_type": old.pop("type")}
    new = load_arch(config)
    assert mla_of(new) == mla_of(arch_of("deepseek-v3.2-tiny"))


def test_stored_bytes_of_the_fp8_releases() -> None:
    """DeepSeek-V3's 91,991 tensors; its files have 688,586,727,753 bytes, headers included."""
    size, tensors = whole_release(summarise(arch_of("deepseek-v3")))
    assert tensors == 91_991
    assert 100 < (688_586_727_753 - size) / tensors < 150  # a header entry is about that long
    summary = summarise(arch_of("deepseek-v3.2"))
    assert whole_release(summary) == (689_468_986_496, 92_425)
    assert summary.stored_bytes == 674_030_337_216
    assert summary.bytes_by_dtype["FP8"] == 670_052_688_576
    assert summary.quantization == "FP8" and "layer 61" in summary.unsupported[0]


def test_fp8_tensors_of_a_layer() -> None:
    tensors = {t.name: t for _, t, _ in maps.census(arch_of("deepseek-v3.2"))}
    layer = "model.layers.3."
    expected = {
        "self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "F8_E4M3"),
        "self_attn.kv_a_proj_with_mqa.weight_scale_inv": ((5, 56), "F32"),
        "self_attn.kv_a_layernorm.weight": ((512,), "BF16"),
        "self_attn.indexer.wk.weight_scale_inv": ((1, 56), "F32"),
        "self_attn.indexer.weights_proj.weight": ((64, 7168), "BF16"),
        "mlp.gate.weight": ((256, 7168), "BF16"),
        "mlp.gate.e_score_correction_bias": ((256,), "F32"),
        "mlp.experts.0.down_proj.weight": ((7168, 2048), "F8_E4M3"),
        "mlp.experts.0.down_proj.weight_scale_inv": ((56, 16), "F32"),
        "mlp.shared_experts.up_proj.weight": ((2048, 7168), "F8_E4M3"),
    }
    found = {leaf: (tensors[layer + leaf].shape, tensors[layer + leaf].dtype) for leaf in expected}
    assert found == expected
    assert not {f"{layer}self_attn.indexer.weights_proj.weight_scale_inv"} & set(tensors)
    assert tensors["lm_head.weight"].dtype == "BF16"


@pytest.mark.parametrize(
    ("kept", "plain"),
    [
        ("model.layers.0.self_attn", ["self_attn.o_proj"]),
        ("model.layers.0.self_attn.o_proj", ["self_attn.o_proj"]),
        ("model.layers.*.mlp*", ["mlp.up_proj"]),
        ("re:.*kv_b_proj", ["self_attn.kv_b_proj"]),
        ("model.layers.1", []),
    ],
)
def test_modules_left_out_of_a_quantised_release(kept: str, plain: list[str]) -> None:
    config = config_of("deepseek-v3.2-tiny")
    config["quantization_config"]["modules_to_not_convert"] = [kept]
    dtypes = {t.name: t.dtype for t in maps.stored_tensors(load_arch(config))}
    for leaf in ("self_attn.o_proj", "self_attn.kv_b_proj", "mlp.up_proj"):
        is_plain = leaf in plain or (leaf.startswith("self_attn") and kept.endswith("self_attn"))
        assert dtypes[f"model.layers.0.{leaf}.weight"] == ("BF16" if is_plain else "F8_E4M3")


FOREIGN: dict[str, dict[str, Any]] = {
    "NVFP4": {"quant_algo": "NVFP4", "quant_method": "modelopt", "ignore": ["model.layers.0*"]},
    "INT4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False},
        }},
    },
    "W4A8": {"quant_method": "w4afp8"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_forms_that_are_only_recognised(name: str) -> None:
    arch = arch_of("glm-5-tiny", quantization_config=FOREIGN[name])
    plain = summarise(arch_of("glm-5-tiny"))
    summary = summarise(arch)
    assert summary.quantization == name
    assert summary.total_parameters == plain.total_parameters
    assert plain.stored_bytes / 4 < summary.stored_bytes < plain.stored_bytes
    assert any(name in line and "refused" in line for line in summary.unsupported)
    with pytest.raises(ArchError) as caught:
        require_readable(arch, "model")
    assert caught.value.code == "TT205" and name in caught.value.rule


def test_nvfp4_bytes_per_weight() -> None:
    """4 bits and an FP8 scale per 16, two F32 numbers per matrix."""
    arch = arch_of("glm-5-tiny", quantization_config={**FOREIGN["NVFP4"], "ignore": []})
    rows, columns = 32, 128
    size = sum(t.num_bytes for t in maps.stored_tensors(arch) if ".1.mlp.experts.5.up_" in t.name)
    assert size == rows * columns // 2 + rows * columns // 16 + 8


def test_an_unknown_form_is_an_error() -> None:
    with pytest.raises(ArchError, match="quant_method"):
        arch_of("glm-5-tiny", quantization_config={"quant_method": "secret"})
    with pytest.raises(ArchError, match="weight_block_size"):
        arch_of("glm-5-tiny", quantization_config={"quant_method": "fp8"})


def test_transformers_module_names() -> None:
    names = maps.module_names(arch_of("glm-5-tiny"))
    assert names["layers.1.mlp.router"] == "model.layers.1.mlp.gate"
    assert names["layers.0.self_attn.indexer.wq_b"] == "model.layers.0.self_attn.indexer.wq_b"
    assert names["layers.1.mlp.shared_experts.up_proj"] == "model.layers.1.mlp.shared_experts.up_proj"
