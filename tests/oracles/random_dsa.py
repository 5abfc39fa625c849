"""Tiny configurations and random checkpoints of the rotated-MLA families, under released names.

deepseek_v3 has no indexer, deepseek_v32 one in every layer, glm_moe_dsa one in some layers. Names
and shapes follow hybrid sheet 3.1, 3.3 and 3.4.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .random_tensors import (
    Draw,
    Tensors,
    draw_indexer,
    draw_latent_kv,
    draw_mlp,
    draw_model,
    draw_q,
    draw_router,
    save_checkpoint,
)

YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}


def tiny_config(family: str, *, layers: int = 4, vocab: int = 100, **fields: Any) -> dict[str, Any]:
    """Return a toy `config.json` of a family, in the spelling of its release.

    Args:
        family: deepseek_v3, deepseek_v32 or glm_moe_dsa.
        layers: depth; the first layer is dense.
        vocab: vocabulary size.
        fields: fields that replace those of the result.
    """
    config = {
        **_constants(),
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
    }
    if family != "deepseek_v3":
        config |= {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
    if family == "glm_moe_dsa":
        config |= _glm(layers)
    else:
        config |= {"rope_theta": 10000, "rope_scaling": YARN, "n_group": 2, "topk_group": 1}
        config |= {"rms_norm_eps": 1e-6, "num_experts_per_tok": 3}
    return config | fields


def random_checkpoint(
    config: Mapping[str, Any], seed: int, *, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Draw every tensor of the released inventory; `dtype` stores those that are BF16 there."""
    draw = Draw(seed, dtype)
    draw_model(draw, "model.", config, partial(_layer, draw, config))
    return draw.tensors


def write_checkpoint(path: Path, config: Mapping[str, Any], seed: int) -> Tensors:
    """Write a random float32 checkpoint directory and return its tensors."""
    return save_checkpoint(path, config, random_checkpoint(config, seed))


def mtp_tensors(config: Mapping[str, Any], seed: int) -> Tensors:
    """Draw the tensors of one multi-token prediction layer, as DeepSeek stores it."""
    draw, width = Draw(seed, torch.float32), config["hidden_size"]
    index = config["num_hidden_layers"]
    at = f"model.layers.{index}."
    draw.normal(f"{at}embed_tokens.weight", (config["vocab_size"], width), 1.0)
    draw.linear(f"{at}shared_head.head.weight", config["vocab_size"], width)
    for leaf in ("enorm", "hnorm", "shared_head.norm"):
        draw.gain(f"{at}{leaf}.weight", width)
    draw.linear(f"{at}eh_proj.weight", width, 2 * width)
    _layer(draw, config, at, index)
    return draw.tensors


def _layer(draw: Draw, config: Mapping[str, Any], at: str, index: int) -> None:
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    draw.gain(f"{at}input_layernorm.weight", width)
    draw.gain(f"{at}post_attention_layernorm.weight", width)
    _attention(draw, f"{at}self_attn.", config, index)
    if index < config["first_k_dense_replace"]:
        draw_mlp(draw, f"{at}mlp.", width, config["intermediate_size"])
        return
    draw_router(draw, f"{at}mlp.", config["n_routed_experts"], width)
    draw_mlp(draw, f"{at}mlp.shared_experts.", width, config["n_shared_experts"] * inner)
    for e in range(config["n_routed_experts"]):
        draw_mlp(draw, f"{at}mlp.experts.{e}.", width, inner)


def _attention(draw: Draw, at: str, config: Mapping[str, Any], index: int) -> None:
    draw_q(draw, at, config)
    draw_latent_kv(draw, at, config)
    kinds = config.get("indexer_types") or ["full"] * (index + 1)
    if "index_topk" in config and kinds[index : index + 1] != ["shared"]:
        draw_indexer(draw, f"{at}indexer.", config)


def _glm(layers: int) -> dict[str, Any]:
    """The fields in which GLM-5 differs, with an indexer in layers 0, 1 and 4."""
    kinds = ["full", "full", "shared", "shared"] * (layers // 4 + 1)
    return {
        "eos_token_id": [97, 98],
        "head_dim": 16,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 2,
        "index_topk_freq": None,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": kinds[:layers],
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "moe_router_dtype": "float32",
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    }


def _constants() -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 96,
        "dtype": "bfloat16",
        "eos_token_id": 97,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "kv_lora_rank": 20,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 24,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 10,
    }
