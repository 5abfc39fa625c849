"""Outlines: the same inventory as the readers', and families that are only planned."""

from __future__ import annotations

import pytest

from trimtab.arch.load import load_arch, load_outline
from trimtab.arch.outline_summary import PLANNED_ONLY, summarise_outline
from trimtab.arch.presets import preset_config, preset_names
from trimtab.arch.summary import summarise
from trimtab.errors import ArchError
from trimtab.plan.job import choose_adapters

QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "vocab_size": 151936,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}
QWEN3_NEXT_PARAMETERS = 79_674_391_296
QWEN3_NEXT = QWEN3_MOE | {
    "model_type": "qwen3_next", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "full_attention_interval": 4,
}


@pytest.mark.parametrize("name", [n for n in preset_names() if "tiny" in n] + ["kimi-k3"])
def test_an_outline_has_the_bytes_of_the_inventory(name: str) -> None:
    config = preset_config(name)
    outline, summary = load_outline(config), summarise(load_arch(config))
    names = {param.name for param in outline.params}
    stored = sum(size for key, size in outline.stored_bytes.items() if key in names)
    assert stored == summary.stored_bytes
    assert outline.is_trained


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # Published totals; transformers counts the same on its meta device.
        (QWEN3_MOE, 30_532_122_624), (LLAMA_8B, 8_030_261_248), (MIXTRAL, 46_702_792_704),
        (GPT_OSS_20B, 20_914_757_184),
    ],
)
def test_parameters_of_planned_families_are_the_published_ones(
    config: dict[str, object], parameters: int
) -> None:
    outline = load_outline(config)
    assert outline.total_parameters == parameters
    assert not outline.is_trained


def test_every_fourth_layer_of_a_hybrid_is_softmax_attention() -> None:
    outline = load_outline(QWEN3_NEXT)
    kinds = [type(layer.mixer).__name__ for layer in outline.layers]
    assert kinds[:4] == ["GatedDeltaSpec"] * 3 + ["GQASpec"] and kinds.count("GQASpec") == 12
    # As transformers counts it on its meta device.
    assert outline.total_parameters == QWEN3_NEXT_PARAMETERS


def test_training_verbs_refuse_a_planned_family_and_say_who_takes_it() -> None:
    with pytest.raises(ArchError, match="only `trimtab plan` and `trimtab inspect`"):
        load_arch(LLAMA_8B)


def test_a_missing_field_is_named() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "intermediate_size"}
    with pytest.raises(ArchError, match="intermediate_size: the field is missing"):
        load_outline(config)


def test_a_summary_says_what_inspect_shows_of_any_model() -> None:
    summary = summarise_outline(load_outline(GPT_OSS_20B))
    assert summary.total_parameters == 20_914_757_184 and summary.num_tensors is None
    # 12 of 24 layers keep all keys: 8 heads of 64 channels, keys and values, two bytes.
    assert summary.kv_bytes_per_token == 12 * 2 * 2 * 8 * 64
    assert [layer.mixer for layer in summary.layers[:2]] == ["gqa", "gqa"]
    assert summary.quantization == "MXFP4" and summary.bytes_by_dtype["MXFP4"] > 9 * 2**30
    assert summary.unsupported == (PLANNED_ONLY,) and "sliding windows of 128" in summary.unusual[0]
    hybrid = summarise_outline(load_outline(QWEN3_NEXT))
    assert hybrid.state_bytes_per_sequence == 36 * 4 * 32 * 128 * 128
    assert [layer.mixer for layer in hybrid.layers[:4]] == ["gdn"] * 3 + ["gqa"]
    assert 3.5e9 < hybrid.active_parameters_per_token < 4e9


def test_adapters_stand_on_matrices_of_planned_families_only() -> None:
    oss = choose_adapters(load_outline(GPT_OSS_20B), 8, ("attention",), "per_expert")
    assert oss.leaves == {"gqa/q_proj", "gqa/k_proj", "gqa/v_proj", "gqa/o_proj",
                          "routed_expert/gate_up", "routed_expert/down"}
    hybrid = load_outline(QWEN3_NEXT)
    linear = choose_adapters(hybrid, 8, ("linear_attention",), "none")
    assert linear.leaves == {"gated_delta/in_proj_qkvz", "gated_delta/in_proj_ba", "gated_delta/out_proj"}
    shared = choose_adapters(hybrid, 8, ("shared_experts",), "none")
    assert "router" not in {leaf.split("/")[0] for leaf in shared.leaves} and len(shared.leaves) == 3


def test_a_tied_table_is_active_as_the_head() -> None:
    untied = summarise_outline(load_outline(LLAMA_8B))
    tied = summarise_outline(load_outline(LLAMA_8B | {"tie_word_embeddings": True}))
    assert tied.active_parameters_per_token == untied.active_parameters_per_token
    assert tied.total_parameters == untied.total_parameters - 128256 * 4096


def test_an_fp8_release_takes_a_byte_per_weight_and_a_scale_per_block() -> None:
    form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    outline = load_outline(QWEN3_MOE | {"quantization_config": form})
    assert outline.stored_bytes["layers.0.self_attn.q_proj.weight"] == 4096 * 2048 + 4 * 32 * 16
    down = 128 * (2048 * 768 + 4 * 16 * 6)
    assert outline.stored_bytes["layers.0.mlp.experts.down"] == down
    for name in ("embed.weight", "layers.0.mlp.router.weight", "layers.0.input_layernorm.weight"):
        numel = next(p.numel for p in outline.params if p.name == name)
        assert outline.stored_bytes[name] == 2 * numel


def test_other_stored_forms_of_planned_families_are_refused() -> None:
    with pytest.raises(ArchError, match=r"quantization_config\.quant_method"):
        load_outline(LLAMA_8B | {"quantization_config": {"quant_method": "awq"}})


def test_a_misspelt_family_is_told_the_nearest_one() -> None:
    with pytest.raises(ArchError, match="did you mean `llama`"):
        load_outline(LLAMA_8B | {"model_type": "llamo"})
