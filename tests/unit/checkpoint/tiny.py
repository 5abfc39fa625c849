"""Tiny checkpoints of both families, and ways to spoil them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.init import init_checkpoint


def k3_config() -> dict[str, Any]:
    """K3.1 with four layers (KDA, KDA, KDA, MLA with indexer), 4 experts, width 64, vision."""
    config: dict[str, Any] = copy.deepcopy(preset_config("k3.1-tiny"))
    text = config["text_config"]
    text.update(
        hidden_size=64, num_hidden_layers=4, vocab_size=96, intermediate_size=64,
        attn_res_block_size=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32,
        kv_lora_rank=16, num_experts=4, num_experts_per_token=2, routed_expert_hidden_size=32,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    text["linear_attn_config"].update(
        kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=32
    )
    config.update(bos_token_id=1, eos_token_id=2, pad_token_id=0, media_placeholder_token_id=3)
    config["vision_config"].update(
        vt_hidden_size=8, mm_hidden_size=8, qkv_hidden_size=16, vt_intermediate_size=16,
        text_hidden_size=64,
    )
    return config


def linear_config() -> dict[str, Any]:
    """Kimi-Linear with four layers (KDA, KDA, KDA, MLA), 4 experts, width 64."""
    config: dict[str, Any] = copy.deepcopy(preset_config("kimi-linear-tiny"))
    config.update(
        hidden_size=64, num_hidden_layers=4, vocab_size=96, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, num_experts=4,
        num_experts_per_token=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    config["linear_attn_config"].update(
        kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=32
    )
    return config


def dsa_config() -> dict[str, Any]:
    """GLM-5 with two layers, 4 experts, width 64."""
    config: dict[str, Any] = copy.deepcopy(preset_config("glm-5-tiny"))
    config.update(
        hidden_size=64, num_hidden_layers=2, vocab_size=96, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=16,
        n_routed_experts=4, num_experts_per_tok=2, indexer_types=["full", "full"],
        index_topk_freq=None, mlp_layer_types=["dense", "sparse"],
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    return config


def make(dst: Path, config: dict[str, Any] | None = None, seed: int = 3) -> ArchSpec:
    """Write a random checkpoint and return its architecture."""
    config = config or k3_config()
    arch = load_arch(config, "test")
    init_checkpoint(arch, config, dst, seed)
    return arch


def spoil(root: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(root / "model.safetensors")
    change(tensors)
    save_file(tensors, root / "model.safetensors")


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8) if a.dim() else a, b.contiguous().view(torch.uint8) if b.dim() else b
    )
