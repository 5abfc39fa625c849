"""Tiny K3 and K3.1 configurations and random checkpoints under the released names and dtypes.

Shapes and dtypes follow K3 sheet 3.1 and 3.2, the indexer hybrid sheet 3.3.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .naive_ops import F64
from .naive_vision import Image
from .random_tensors import (
    Draw,
    Tensors,
    draw_conv,
    draw_decay,
    draw_latent_kv,
    draw_latent_q,
    draw_mlp,
    draw_router,
    layer_schedule,
    random_ids,
)


def tiny_config(
    indexer: bool = False,
    *,
    vision: bool | Mapping[str, Any] = False,
    layers: int = 6,
    hidden: int = 64,
    vocab: int = 100,
    block: int = 3,
    heads: int = 4,
    experts: int = 16,
    top_k: int = 4,
    latent: int = 32,
    expert_width: int = 32,
    index_topk: int = 8,
    linear: Mapping[str, Any] | None = None,
    **text_fields: Any,
) -> dict[str, Any]:
    """Return a toy `config.json` of the released shape (K3 sheet section 1).

    Args:
        indexer: add the `dsa_config` of K3.1 (8 heads, so that exact score ties are rare).
        vision: add a toy `vision_config`, with a 5 x 7 grid of positions; a mapping replaces
            fields of it.
        layers: depth; MLA at 0-based i % 4 == 3 and in the last layer, KDA elsewhere.
        hidden: model width.
        vocab: vocabulary size; the last four ids are bos, eos, media and pad.
        block: layers per Attention-Residual block.
        heads: heads of both mixers.
        experts: routed experts.
        top_k: experts per token.
        latent: width the routed experts work in, a multiple of 32.
        expert_width: inner width of one expert, a multiple of 32.
        index_topk: keys the indexer selects.
        linear: fields that replace those of `linear_attn_config`.
        text_fields: fields that replace those of `text_config`.
    """
    text = {
        **_text_sizes(layers, hidden, vocab, heads),
        **_text_constants(vocab),
        "attn_res_block_size": block,
        "num_experts": experts,
        "num_experts_per_token": top_k,
        "num_shared_experts": 2,
        "moe_intermediate_size": expert_width,
        "routed_expert_hidden_size": latent,
        "linear_attn_config": {**_linear_attn(layers, heads), **(linear or {})},
        "quantization_config": _quantization(),
    }
    if indexer:
        dsa = {"index_n_heads": 8, "index_head_dim": 8, "index_topk": index_topk}
        text["dsa_config"] = dsa
    name = "KimiK31ForConditionalGeneration" if indexer else "KimiK3ForConditionalGeneration"
    config = {
        "architectures": [name],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "ignore_index": -100,
        **_token_ids(vocab),
        "media_placeholder_token_id": vocab - 2,
        "tie_word_embeddings": False,
        "text_config": {**text, **text_fields},
    }
    if vision is not False:
        fields = {} if vision is True else vision
        config["vision_config"] = {**_vision(hidden), **fields}
    return config


def random_checkpoint(
    config: Mapping[str, Any],
    seed: int,
    *,
    packed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Draw every tensor of the released inventory for this configuration.

    Args:
        config: a released-shape configuration, such as `tiny_config` returns.
        seed: the same seed draws the same values whatever `packed` and `dtype`.
        packed: experts as `weight_packed` and `weight_scale`, else decoded to `weight`.
        dtype: storage of the tensors that are BF16 in the release; F32 and U8 ones keep theirs.
    """
    draw = Draw(seed, dtype)
    text = config["text_config"]
    width = text["hidden_size"]
    top = "language_model."
    draw.normal(f"{top}model.embed_tokens.weight", (text["vocab_size"], width), 1.0)
    for index in range(text["num_hidden_layers"]):
        _layer(draw, f"{top}model.layers.{index}.", text, index, packed)
    draw.gain(f"{top}model.norm.weight", width)
    draw.gain(f"{top}model.output_attn_res_norm.weight", width)
    draw.linear(f"{top}model.output_attn_res_proj.weight", 1, width)
    draw.linear(f"{top}lm_head.weight", text["vocab_size"], width)
    if "vision_config" in config:
        _vision_tensors(draw, config["vision_config"])
    return draw.tensors


def random_image(grid: tuple[int, int, int], seed: int, patch: int = 14) -> Image:
    """Draw patches [t*h*w, 3, patch, patch] in [-1, 1], float64 values that float32 holds too."""
    generator = torch.Generator().manual_seed(seed)
    shape = (math.prod(grid), 3, patch, patch)
    return (2 * torch.rand(shape, generator=generator) - 1).to(F64), grid


def image_prompt(
    config: Mapping[str, Any], grids: list[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[Image]]:
    """Draw images and a prompt with 3 to 9 text tokens before, between and after them."""
    ids: list[int] = []
    for n, (_, height, width) in enumerate(grids):
        down, across = config["vision_config"]["merge_kernel_size"]
        ids += random_ids(config, 3 + (seed + 5 * n) % 7, seed + n)
        pads = (height // down) * (width // across)
        ids += [config["media_placeholder_token_id"]] * pads
    ids += random_ids(config, 9, seed + len(grids))
    return ids, [random_image(grid, seed + n) for n, grid in enumerate(grids)]


def _layer(draw: Draw, at: str, text: Mapping[str, Any], index: int, packed: bool) -> None:
    width = text["hidden_size"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        draw.gain(f"{at}{norm}.weight", width)
    for site in ("self_attention_res", "mlp_res"):
        draw.gain(f"{at}{site}_norm.weight", width)
        draw.linear(f"{at}{site}_proj.weight", 1, width)
    mixer = _mla if index + 1 in text["linear_attn_config"]["full_attn_layers"] else _kda
    mixer(draw, f"{at}self_attn.", text)
    if index < text["first_k_dense_replace"]:
        draw_mlp(draw, f"{at}mlp.", width, text["intermediate_size"])
    else:
        _moe(draw, f"{at}block_sparse_moe.", text, packed)


def _kda(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    linear, width = text["linear_attn_config"], text["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    inner = heads * dim
    for n in "qkvg":
        draw.linear(f"{at}{n}_proj.weight", inner, width)
    for n in "qkv":
        draw_conv(draw, f"{at}{n}_conv1d.weight", inner, linear["short_conv_kernel_size"])
    draw.linear(f"{at}f_a_proj.weight", dim, width)
    draw.linear(f"{at}f_b_proj.weight", inner, dim)
    draw.linear(f"{at}b_proj.weight", heads, width)
    a_log, dt_bias = draw_decay(draw, heads, inner, (0.5, 2.0))
    tail = torch.zeros(max(0, dim - heads))
    draw.tensors[f"{at}A_log"] = torch.cat([a_log, tail])
    draw.tensors[f"{at}dt_bias"] = dt_bias
    draw.gain(f"{at}o_norm.weight", dim, torch.float32)
    draw.linear(f"{at}o_proj.weight", width, inner)


def _mla(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    draw_latent_q(draw, at, text)
    draw_latent_kv(draw, at, text)
    width = text["hidden_size"]
    draw.linear(f"{at}g_proj.weight", text["num_attention_heads"] * text["v_head_dim"], width)
    dsa = text.get("dsa_config")
    if dsa:
        heads, dim = dsa["index_n_heads"], dsa["index_head_dim"]
        draw.linear(f"{at}indexer.wq_b.weight", heads * dim, text["q_lora_rank"])
        draw.linear(f"{at}indexer.wk.weight", dim, width)
        draw.linear(f"{at}indexer.weights_proj.weight", heads, width)
        draw.gain(f"{at}indexer.k_norm.weight", dim)
        draw.normal(f"{at}indexer.k_norm.bias", (dim,), 0.2)


def _moe(draw: Draw, at: str, text: Mapping[str, Any], packed: bool) -> None:
    width, latent = text["hidden_size"], text["routed_expert_hidden_size"]
    inner = text["moe_intermediate_size"]
    draw_router(draw, at, text["num_experts"], width)
    draw.linear(f"{at}routed_expert_down_proj.weight", latent, width)
    draw.gain(f"{at}routed_expert_norm.weight", latent)
    draw.linear(f"{at}routed_expert_up_proj.weight", width, latent)
    draw_mlp(draw, f"{at}shared_experts.", width, text["num_shared_experts"] * inner)
    for e in range(text["num_experts"]):
        draw.mxfp4(f"{at}experts.{e}.w1", inner, latent, packed)
        draw.mxfp4(f"{at}experts.{e}.w3", inner, latent, packed)
        draw.mxfp4(f"{at}experts.{e}.w2", latent, inner, packed)


def _vision_tensors(draw: Draw, vision: Mapping[str, Any]) -> None:
    width, inner = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    patch, qkv = vision["patch_size"], vision["qkv_hidden_size"]
    at = "vision_tower."
    draw.normal(f"{at}patch_embed.proj.weight", (width, 3, patch, patch), (3 * patch**2) ** -0.5)
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    draw.normal(f"{at}patch_embed.pos_emb.weight", grid, 1.0)
    for block in range(vision["vt_num_hidden_layers"]):
        b = f"{at}encoder.blocks.{block}."
        draw.gain(f"{b}norm0.weight", width)
        draw.gain(f"{b}norm1.weight", width)
        draw.linear(f"{b}wqkv.weight", 3 * qkv, width)
        draw.linear(f"{b}wo.weight", width, qkv)
        draw.linear(f"{b}mlp.fc0.weight", inner, width)
        draw.linear(f"{b}mlp.fc1.weight", width, inner)
    draw.gain(f"{at}encoder.final_layernorm.weight", width)
    merged = math.prod(vision["merge_kernel_size"]) * vision["mm_hidden_size"]
    draw.linear("mm_projector.proj.0.weight", merged, merged)
    draw.linear("mm_projector.proj.2.weight", vision["text_hidden_size"], merged)
    draw.gain("mm_projector.post_norm.weight", vision["text_hidden_size"])


def _text_sizes(layers: int, hidden: int, vocab: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
    }


def _text_constants(vocab: int) -> dict[str, Any]:
    return {
        **_token_ids(vocab),
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _token_ids(vocab: int) -> dict[str, int]:
    return {"bos_token_id": vocab - 4, "eos_token_id": vocab - 3, "pad_token_id": vocab - 1}


def _linear_attn(layers: int, heads: int) -> dict[str, Any]:
    return {
        **layer_schedule(layers),
        "num_heads": heads,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }


def _quantization() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": weights}
    parts = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj")
    outside = ("lm_head", "vision_tower", "mm_projector")
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "input_activations": None}},
        "ignore": [f"re:.*{part}.*" for part in (*parts, *outside)],
    }


def _vision(text_hidden: int) -> dict[str, Any]:
    """A tower whose sizes all differ, so that a swapped pair of them cannot go unseen."""
    return {
        "patch_size": 14,
        "vt_hidden_size": 20,
        "vt_num_hidden_layers": 3,
        "vt_num_attention_heads": 2,
        "qkv_hidden_size": 24,
        "vt_intermediate_size": 28,
        "init_pos_emb_height": 5,
        "init_pos_emb_width": 7,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "norm_type": "rmsnorm",
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "merge_type": "sd2_tpool",
        "merge_kernel_size": [2, 2],
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": 20,
        "text_hidden_size": text_hidden,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
    }
