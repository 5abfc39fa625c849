"""Weight maps cover every element once and can be undone."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest

from trimtab.arch import maps
from trimtab.arch.load import load_arch
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.presets import preset_config, preset_names
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import StoredTensor

SMALL = [name for name in preset_names() if "tiny" in name]


def arch_of(name: str) -> ArchSpec:
    return load_arch(preset_config(name), name)


def part_shape(param: ParamSpec, tensor: StoredTensor) -> tuple[int, ...]:
    return param.shape[len(tensor.index):]


def logical_shape(tensor: StoredTensor) -> tuple[int, ...]:
    rows, columns = tensor.shape
    per_column = {"mxfp4_packed": 2, "mxfp4_scale": 32}[tensor.transform]
    return (rows, columns * per_column)


@pytest.mark.parametrize("name", SMALL)
def test_every_element_is_stored_exactly_once(name: str) -> None:
    arch = arch_of(name)
    params = {param.name: param for param in inventory(arch)}
    covered = dict.fromkeys(params, 0)
    seen: set[tuple[str, tuple[int, ...], str]] = set()
    for tensor in maps.stored_tensors(arch):
        param = params[tensor.param]
        part = part_shape(param, tensor)
        key = (tensor.param, tensor.index, tensor.transform)
        assert key not in seen
        seen.add(key)
        if tensor.transform.startswith("mxfp4"):
            assert logical_shape(tensor) == part
        elif tensor.transform == "int4_packed":
            assert tensor.shape == (part[0], part[1] // 8)
        elif tensor.transform == "int4_shape":
            assert tensor.shape == (2,)
        elif tensor.transform in ("fp8_scale", "int4_scale"):
            assert tensor.shape == tuple(-(-n // b) for n, b in zip(part, tensor.block, strict=True))
        elif tensor.transform == "pad_tail":
            assert prod(tensor.shape) >= prod(part) and tensor.shape[0] % 128 == 0
        else:
            assert prod(tensor.shape) == prod(part)
        if not tensor.transform.endswith(("_scale", "_shape")):
            covered[tensor.param] += prod(part)
    assert covered == {param.name: param.numel for param in params.values()}


@pytest.mark.parametrize("name", preset_names())
def test_a_released_name_leads_back_to_its_parameter(name: str) -> None:
    arch = arch_of(name)
    for _, tensor, _ in maps.census(arch):
        assert maps.released_owner(arch, tensor.name) == (tensor.param, tensor.index)


@pytest.mark.parametrize("name", SMALL)
def test_released_names_are_unique(name: str) -> None:
    names = [tensor.name for tensor in maps.stored_tensors(arch_of(name))]
    assert len(names) == len(set(names))


def test_k3_released_names_shapes_and_dtypes() -> None:
    tensors = {t.name: t for _, t, _ in maps.census(arch_of("kimi-k3"))}
    layer = "language_model.model.layers.1."
    expected = {
        layer + "self_attn.A_log": ((128,), "F32"),
        layer + "self_attn.q_conv1d.weight": ((12288, 1, 4), "F32"),
        layer + "self_attn.o_norm.weight": ((128,), "F32"),
        layer + "block_sparse_moe.gate.weight": ((896, 7168), "BF16"),
        layer + "block_sparse_moe.gate.e_score_correction_bias": ((896,), "F32"),
        layer + "block_sparse_moe.routed_expert_norm.weight": ((3584,), "BF16"),
        layer + "block_sparse_moe.shared_experts.gate_proj.weight": ((6144, 7168), "BF16"),
        layer + "block_sparse_moe.experts.0.w1.weight_packed": ((3072, 1792), "U8"),
        layer + "block_sparse_moe.experts.0.w3.weight_scale": ((3072, 112), "U8"),
        layer + "block_sparse_moe.experts.0.w2.weight_packed": ((3584, 1536), "U8"),
        layer + "block_sparse_moe.experts.0.w2.weight_scale": ((3584, 96), "U8"),
        "language_model.model.layers.0.mlp.gate_proj.weight": ((33792, 7168), "BF16"),
        "vision_tower.encoder.blocks.26.wqkv.weight": ((4608, 1024), "BF16"),
        "mm_projector.post_norm.weight": ((7168,), "BF16"),
        "language_model.model.output_attn_res_proj.weight": ((1, 7168), "BF16"),
    }
    assert {name: (tensors[name].shape, tensors[name].dtype) for name in expected} == expected


def test_w1_is_gate_and_w3_is_up() -> None:
    for name in SMALL:
        for tensor in maps.stored_tensors(arch_of(name)):
            if ".w1." in tensor.name:
                assert tensor.index[1] == 0
            elif ".w3." in tensor.name:
                assert tensor.index[1] == 1
            elif ".w2." in tensor.name:
                assert tensor.param.endswith("experts.down") and len(tensor.index) == 1


def test_k3_without_quantization_config_stores_plain_experts() -> None:
    config: dict[str, Any] = copy.deepcopy(preset_config("k3-tiny"))
    del config["text_config"]["quantization_config"]
    expert = [t for t in maps.stored_tensors(load_arch(config)) if ".experts.5.w2" in t.name]
    assert {t.name.rsplit(".", 1)[1] for t in expert} == {"weight"}
    text = config["text_config"]
    shape = (text["routed_expert_hidden_size"], text["moe_intermediate_size"])
    assert expert[0].shape == shape and expert[0].dtype == "BF16"


def test_module_names_follow_transformers_where_it_has_the_family() -> None:
    names = maps.module_names(arch_of("kimi-linear-tiny"))
    assert names["layers.0.self_attn.f_a_proj"] == "model.layers.0.self_attn.forget_gate.f_a_proj"
    assert names["layers.0.mlp.gate_proj"] == "model.layers.0.mlp.gate_proj"
    assert names["layers.3.self_attn.q_proj"] == "model.layers.3.self_attn.q_proj"
    assert not any("experts.gate_up" in name for name in names)


def test_module_names_of_k3_are_the_released_ones() -> None:
    names = maps.module_names(arch_of("k3.1-tiny"))
    layer = "language_model.model.layers.3."
    assert names["layers.3.self_attn.q_a_proj"] == layer + "self_attn.q_a_proj"
    assert names["layers.3.self_attn.indexer.wk"] == layer + "self_attn.indexer.wk"
    assert names["layers.3.mlp.latent_up"] == layer + "block_sparse_moe.routed_expert_up_proj"
    assert "embed" not in names and "norm" not in names


def test_what_a_file_may_hold_instead() -> None:
    k3 = arch_of("k3-tiny")
    padded = next(t for t in maps.stored_tensors(k3) if t.name.endswith("A_log"))
    assert padded.shape == (128,)
    assert maps.accepts_shape(padded, (4,), (4,)) and maps.accepts_shape(padded, (4,), (32,))
    assert not maps.accepts_shape(padded, (4,), (3,))
    assert maps.accepted_dtypes(k3, padded) == ("F32",)
    linear = arch_of("kimi-linear-tiny")
    reshaped = next(t for t in maps.stored_tensors(linear) if t.name.endswith("A_log"))
    assert reshaped.shape == (1, 1, 4, 1)
    assert maps.accepts_shape(reshaped, (4,), (4,))
    assert set(maps.accepted_dtypes(linear, reshaped)) == {"F32", "BF16"}
