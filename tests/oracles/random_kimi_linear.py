"""Tiny kimi_linear configurations and random checkpoints under the released names.

Two variants: a direct query projection (`q_lora_rank` null, as released) and a low-rank one.
Names and shapes follow hybrid sheet 3.1 to 3.4.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .random_tensors import (
    Draw,
    Tensors,
    draw_kda,
    draw_latent_kv,
    draw_mlp,
    draw_model,
    draw_q,
    draw_router,
    layer_schedule,
    save_checkpoint,
)


def tiny_config(
    q_lora_rank: int | None = None,
    *,
    layers: int = 5,
    hidden: int = 32,
    vocab: int = 100,
    heads: int = 4,
    **fields: Any,
) -> dict[str, Any]:
    """Return a toy `config.json` of the shape of Kimi-Linear-48B-A3B-Instruct.

    Args:
        q_lora_rank: rank of the query path; None means a direct `q_proj`.
        layers: depth; MLA at 0-based i % 4 == 3 and in the last layer.
        hidden: model width.
        vocab: vocabulary size; bos, eos and pad are among the last four ids.
        heads: heads of both mixers.
        fields: fields that replace those of the result.
    """
    linear = {
        **layer_schedule(layers),
        "num_heads": heads,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    }
    return {
        **_constants(),
        "bos_token_id": vocab - 4,
        "eos_token_id": vocab - 3,
        "pad_token_id": vocab - 1,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 2 * hidden,
        "linear_attn_config": linear,
        "q_lora_rank": q_lora_rank,
        **fields,
    }


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


def _layer(draw: Draw, config: Mapping[str, Any], at: str, index: int) -> None:
    width = config["hidden_size"]
    draw.gain(f"{at}input_layernorm.weight", width)
    draw.gain(f"{at}post_attention_layernorm.weight", width)
    mixer = _mla if index + 1 in config["linear_attn_config"]["full_attn_layers"] else _kda
    mixer(draw, f"{at}self_attn.", config)
    if index < config["first_k_dense_replace"]:
        draw_mlp(draw, f"{at}mlp.", width, config["intermediate_size"])
    else:
        _moe(draw, f"{at}block_sparse_moe.", config)


def _kda(draw: Draw, at: str, config: Mapping[str, Any]) -> None:
    draw_kda(draw, at, config, torch.float32)
    draw.tensors[f"{at}A_log"] = draw.tensors[f"{at}A_log"].reshape(1, 1, -1, 1)


def _mla(draw: Draw, at: str, config: Mapping[str, Any]) -> None:
    draw_q(draw, at, config)
    draw_latent_kv(draw, at, config)


def _moe(draw: Draw, at: str, config: Mapping[str, Any]) -> None:
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    draw_router(draw, at, config["num_experts"], width)
    draw_mlp(draw, f"{at}shared_experts.", width, config["num_shared_experts"] * inner)
    for e in range(config["num_experts"]):
        draw.linear(f"{at}experts.{e}.w1.weight", inner, width)
        draw.linear(f"{at}experts.{e}.w3.weight", inner, width)
        draw.linear(f"{at}experts.{e}.w2.weight", width, inner)


def _constants() -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "head_dim": 8,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_max_length": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_nextn_predict_layers": 0,
    }
