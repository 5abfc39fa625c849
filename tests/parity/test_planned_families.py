"""Parameters of families that are only planned are those that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from trimtab.arch.load import load_outline

BASE: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 384, "max_position_embeddings": 512,
}
MOE = BASE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
MLA = BASE | {
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 8,
}
DELTA = {
    "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_num_value_heads": 8,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "shared_expert_intermediate_size": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": BASE, "mistral": BASE, "qwen2": BASE, "qwen3": BASE | {"head_dim": 32},
    "qwen3_moe": MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_next": MOE | DELTA, "mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
                       "sliding_window": 64},
    "glm4_moe": MLA | {"head_dim": 32, "use_qk_norm": True, "attention_bias": True, "kv_lora_rank": None},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 96, "decoder_sparse_step": 1},
    "deepseek_v2": MLA,
}
# Selection biases are buffers in transformers, and parameters of the released files.
BUFFERS = "e_score_correction_bias"


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", CASES)
def test_as_many_parameters_as_transformers_builds(family: str) -> None:
    values = {key: value for key, value in CASES[family].items() if value is not None}
    config = CONFIG_MAPPING[family](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = sum(param.numel() for param in model.parameters())
    ours = load_outline(values | {"model_type": family, "tie_word_embeddings": config.tie_word_embeddings})
    assert sum(p.numel for p in ours.params if BUFFERS not in p.name) == theirs
