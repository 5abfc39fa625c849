"""Tiny kimi_k25 configurations and random checkpoints: deepseek_v3 below `language_model.`, and a tower.

The tower is never run here; transformers does not load a checkpoint without one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import random_dsa
from .random_tensors import Draw, Tensors, save_checkpoint

_PROJECTION = 1152  # transformers has no other width of the projector's norm


def tiny_config(**fields: Any) -> dict[str, Any]:
    """Return a toy `config.json` of the shape of Kimi-K2.5; `fields` replace those of the text."""
    text = random_dsa.tiny_config("deepseek_v3", **fields) | {"model_type": "kimi_k2"}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {
            "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
            "intermediate_size": 24, "mm_hidden_size": 16, "text_hidden_size": text["hidden_size"],
            "pos_emb_height": 4, "pos_emb_width": 4,
        },
    }


def write_checkpoint(path: Path, config: Mapping[str, Any], seed: int) -> Tensors:
    """Write a random float32 checkpoint directory and return its tensors."""
    text = random_dsa.random_checkpoint(config["text_config"], seed)
    tensors = {f"language_model.{name}": tensor for name, tensor in text.items()}
    return save_checkpoint(path, config, tensors | _vision(config["vision_config"], seed))


def _vision(vision: Mapping[str, Any], seed: int) -> Tensors:
    draw = Draw(seed, torch.float32)
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    tower, merged = "vision_tower.", 4 * vision["mm_hidden_size"]
    draw.normal(f"{tower}patch_embed.proj.weight", (width, 3, 14, 14), 0.1)
    grid = (vision["pos_emb_height"], vision["pos_emb_width"], width)
    draw.normal(f"{tower}patch_embed.pos_emb.weight", grid, 1.0)
    block = f"{tower}encoder.blocks.0."
    matrices = {
        f"{block}wqkv": (3 * width, width), f"{block}wo": (width, width),
        f"{block}mlp.fc0": (inner, width), f"{block}mlp.fc1": (width, inner),
        "mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (vision["text_hidden_size"], merged),
    }
    for name, (rows, columns) in matrices.items():
        draw.linear(f"{name}.weight", rows, columns)
    norms = {f"{block}norm0": width, f"{block}norm1": width, f"{tower}encoder.final_layernorm": width,
             "mm_projector.pre_norm": _PROJECTION}
    for name, size in norms.items():
        draw.gain(f"{name}.weight", size)
    biased = {f"{tower}patch_embed.proj": width} | norms | {n: rows for n, (rows, _) in matrices.items()}
    for name, size in biased.items():
        draw.normal(f"{name}.bias", (size,), 0.2)
    return draw.tensors
