"""Tiny glm5_next configurations and random checkpoints under the released names.

Names and shapes follow hybrid sheet 3.1 to 3.5; the config is spelled as in the release.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .random_tensors import (
    Draw,
    Tensors,
    draw_indexer,
    draw_kda,
    draw_latent_kv,
    draw_latent_q,
    draw_mlp,
    draw_model,
    draw_router,
    save_checkpoint,
)

Grid = tuple[int, int, int]
_KDA, _SPARSE = "linear_attention", "deepseek_sparse_attention"


def tiny_config(
    *, kinds: str = "KSKS", experts: int = 8, vocab: int = 100, **fields: Any
) -> dict[str, Any]:
    """Return a toy `config.json` of the shape of GLM-5.3-Flash.

    Args:
        kinds: a letter per layer, K for KDA, S for sparse attention, s for sparse attention that
            reuses the selection of the layer before.
        experts: routed experts per layer.
        vocab: vocabulary size; the special tokens are the last eight ids.
        fields: fields of text_config that replace those of the result.
    """
    types = [_KDA if kind == "K" else _SPARSE for kind in kinds]
    text = {
        **_text_constants(),
        "vocab_size": vocab,
        "pad_token_id": vocab - 1,
        "eos_token_id": [vocab - 2],
        "layer_types": types,
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(kinds) - 1),
        "indexer_types": ["shared" if kind == "s" else "full" for kind in kinds],
        "num_hidden_layers": len(kinds),
        "n_routed_experts": experts,
        "linear_attn_config": {
            "kda_layers": [i for i, kind in enumerate(types) if kind == _KDA],
            "full_attn_layers": [i for i, kind in enumerate(types) if kind == _SPARSE],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        **fields,
    }
    tokens = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "float32",
        **{f"{name}_token_id": vocab - 8 + i for i, name in enumerate(tokens)},
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": _vision_config(text["hidden_size"]),
    }


def random_checkpoint(
    config: Mapping[str, Any], seed: int, *, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensors:
    """Draw every tensor of the released inventory.

    Args:
        config: as from `tiny_config`.
        seed: of the draw.
        dtype: stores what is BF16 in the release.
        scale: factor on what enters a gated activation, so that its clamp is reached.
    """
    draw, text = Draw(seed, dtype), config["text_config"]
    layer = partial(_layer, draw, text)
    draw_model(draw, "model.language_model.", text, layer)
    if "vision_config" in config:
        _vision(draw, "model.visual.", config["vision_config"])
    for name, tensor in draw.tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor.mul_(scale)
    return draw.tensors


def write_checkpoint(
    path: Path, config: Mapping[str, Any], seed: int, *, scale: float = 1.0
) -> Tensors:
    """Write a random float32 checkpoint directory and return its tensors."""
    return save_checkpoint(path, config, random_checkpoint(config, seed, scale=scale))


@dataclass(frozen=True)
class Item:
    """An image or a video of a prompt.

    Args:
        patches: [n, 3, F, P, P], slice by slice and row by row.
        grid: slices, rows and columns of patches.
        span: first and one past the last of its placeholders.
        is_video: between the tokens of a video.
    """

    patches: Tensor
    grid: Grid
    span: tuple[int, int]
    is_video: bool


def random_words(config: Mapping[str, Any], length: int, seed: int) -> list[int]:
    """Draw token ids, none of them special."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(config["text_config"]["vocab_size"] - 8, (length,), generator=draw).tolist()


def media_prompt(
    config: Mapping[str, Any], grids: Sequence[tuple[Grid, bool]], length: int, seed: int
) -> tuple[list[int], list[Item]]:
    """Draw a prompt with images and videos in text, at least `length` tokens long.

    Args:
        config: as from `tiny_config`.
        grids: grid of each item, and whether it is a video, whose slices each get a frame of
            tokens.
        length: of the prompt.
        seed: of the draw.
    """
    names = ("image", "image_start", "image_end", "video_start", "video_end")
    media, begin, end, first, last = (config[f"{name}_token_id"] for name in names)
    vision, words = config["vision_config"], iter(random_words(config, 500, seed))
    draw, ids, items = torch.Generator().manual_seed(seed), [], []
    for grid, is_video in grids:
        ids += [next(words) for _ in range(5)] + ([first] if is_video else [])
        slices, rows, columns = grid
        start = len(ids) + 1
        for _ in range(slices):
            count = rows * columns // vision["spatial_merge_size"] ** 2
            ids += [begin, *[media] * count, end]
            ids += [next(words), next(words)] if is_video else []
        stop = len(ids) - ids[::-1].index(media)
        ids += [last] if is_video else []
        side = vision["patch_size"]
        shape = (slices * rows * columns, 3, vision["temporal_patch_size"], side, side)
        items.append(Item(torch.randn(shape, generator=draw), grid, (start, stop), is_video))
    return ids + [next(words) for _ in range(length - len(ids))], items


def processor_output(config: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Tensor]:
    """The arguments of transformers' forward pass: patches flat, block of a token after block."""
    merge, found = config["vision_config"]["spatial_merge_size"], {}
    for is_video, pixels, grid in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [item for item in items if item.is_video is is_video]
        if chosen:
            found[pixels] = torch.cat([_block_major(item, merge) for item in chosen])
            found[grid] = torch.tensor([item.grid for item in chosen])
    return found


def _block_major(item: Item, merge: int) -> Tensor:
    slices, rows, columns = item.grid
    blocks = item.patches.reshape(slices, rows // merge, merge, columns // merge, merge, -1)
    return blocks.transpose(2, 3).reshape(slices * rows * columns, -1)


def _layer(draw: Draw, text: Mapping[str, Any], at: str, index: int) -> None:
    width = text["hidden_size"]
    for block in ("attn", "ffn"):
        _hyper(draw, f"{at}hc_{block}_", text)
    draw.gain(f"{at}input_layernorm.weight", width)
    draw.gain(f"{at}post_attention_layernorm.weight", width)
    if text["layer_types"][index] == _KDA:
        draw_kda(draw, f"{at}self_attn.", text)
    else:
        draw_latent_q(draw, f"{at}self_attn.", text)
        draw_latent_kv(draw, f"{at}self_attn.", text)
        if text["indexer_types"][index] == "full":
            _indexer(draw, f"{at}self_attn.indexer.", text)
    if text["mlp_layer_types"][index] == "dense":
        draw_mlp(draw, f"{at}mlp.", width, text["intermediate_size"])
    else:
        _moe(draw, f"{at}mlp.", text)


def _hyper(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    """Weights that tell the streams apart: at init they are all alike."""
    n = text["hc_mult"]
    rows = (2 + n) * n
    draw.linear(f"{at}fn", rows, n * text["hidden_size"])
    draw.normal(f"{at}base", (rows,), 1.0, dtype=torch.float32)
    draw.normal(f"{at}scale", (3,), 0.2, mean=1.0, dtype=torch.float32)


def _indexer(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    width, dim = text["hidden_size"], text["index_head_dim"]
    draw_indexer(draw, at, text)
    draw.normal(f"{at}index_kpool_compress_ape", (text["index_kpool"], dim), 1.0)
    draw.linear(f"{at}index_kpool_compress_gate", dim, width)


def _moe(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    width, inner = text["hidden_size"], text["moe_intermediate_size"]
    draw_router(draw, at, text["n_routed_experts"], width)
    draw_mlp(draw, f"{at}shared_experts.", width, text["n_shared_experts"] * inner)
    for e in range(text["n_routed_experts"]):
        draw_mlp(draw, f"{at}experts.{e}.", width, inner)


def _biased(draw: Draw, at: str, rows: int, columns: int) -> None:
    draw.linear(f"{at}.weight", rows, columns)
    draw.normal(f"{at}.bias", (rows,), 0.2)


def _vision(draw: Draw, at: str, vision: Mapping[str, Any]) -> None:
    d, side, merge = vision["hidden_size"], vision["patch_size"], vision["spatial_merge_size"]
    patch = (3, vision["temporal_patch_size"], side, side)
    draw.normal(f"{at}patch_embed.proj.weight", (d, *patch), (3 * 2 * side * side) ** -0.5)
    draw.normal(f"{at}patch_embed.proj.bias", (d,), 0.2)
    for i in range(vision["depth"]):
        block = f"{at}blocks.{i}."
        draw.gain(f"{block}norm1.weight", d)
        draw.gain(f"{block}norm2.weight", d)
        _biased(draw, f"{block}attn.qkv", 3 * d, d)
        _biased(draw, f"{block}attn.proj", d, d)
        for n in "qk":
            draw.gain(f"{block}attn.{n}_norm.weight", d // vision["num_heads"])
        for leaf in ("gate_proj", "up_proj"):
            _biased(draw, f"{block}mlp.{leaf}", vision["intermediate_size"], d)
        _biased(draw, f"{block}mlp.down_proj", d, vision["intermediate_size"])
    draw.gain(f"{at}post_layernorm.weight", d)
    out, inner = vision["out_hidden_size"], vision["projection_intermediate_size"]
    draw.normal(f"{at}downsample.weight", (out, d, merge, merge), (d * merge * merge) ** -0.5)
    draw.normal(f"{at}downsample.bias", (out,), 0.2)
    draw.linear(f"{at}merger.proj.weight", out, out)
    draw.gain(f"{at}merger.post_projection_norm.weight", out)
    draw.normal(f"{at}merger.post_projection_norm.bias", (out,), 0.2)
    draw_mlp(draw, f"{at}merger.", out, inner)


def _vision_config(width: int) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_vision",
        "attention_bias": True,
        "depth": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "in_channels": 3,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 4,
        "projection_intermediate_size": 48,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        "spatial_merge_size": 2,
        "swiglu_limit": 10.0,
        "temporal_patch_size": 2,
    }


def _text_constants() -> dict[str, Any]:
    return {
        "model_type": "glm5_next_text",
        "attention_bias": False,
        "bos_token_id": None,
        "first_k_dense_replace": 1,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hidden_act": "silu",
        "hidden_size": 32,
        "index_head_dim": 8,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_n_heads": 16,
        "index_topk": 16,
        "indexer_rope_interleave": True,
        "intermediate_size": 64,
        "kv_lora_rank": 20,
        "max_position_embeddings": 4096,
        "mhc": True,
        "mla_use_nope": True,
        "moe_intermediate_size": 24,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 24,
        "qk_head_dim": 12,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 12,
    }
