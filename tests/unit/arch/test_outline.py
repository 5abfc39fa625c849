"""Outlines: the same inventory as the readers', and families that are only planned."""

from __future__ import annotations

import pytest

from trimtab.arch.load import load_arch, load_outline
from trimtab.arch.presets import preset_config, preset_names
from trimtab.arch.summary import summarise
from trimtab.errors import ArchError

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
    assert 79e9 < outline.total_parameters < 81e9


def test_training_verbs_refuse_a_planned_family_and_say_who_takes_it() -> None:
    with pytest.raises(ArchError, match="only `trimtab plan` and `trimtab inspect`"):
        load_arch(LLAMA_8B)


def test_a_missing_field_is_named() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "intermediate_size"}
    with pytest.raises(ArchError, match="intermediate_size: the field is missing"):
        load_outline(config)
