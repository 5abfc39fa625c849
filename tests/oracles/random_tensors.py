"""Seeded draws of named tensors and of the parts that K3 and kimi_linear have in common.

Values are drawn so that mistakes show: activations stay of order one, and norm weights, router
bias and decay parameters are away from their trivial values.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .naive_ops import MXFP4_GROUP, decode_mxfp4

Tensors = dict[str, Tensor]
CODES_OF_LARGE_MAGNITUDES = (6, 7, 14, 15)  # +-4, +-6: every group keeps max|w| / scale > 3


def random_ids(config: Mapping[str, Any], length: int, seed: int) -> list[int]:
    """Draw ordinary token ids (none of the four special ones at the end of the vocabulary)."""
    vocab = config.get("text_config", config)["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab - 4, (length,), generator=generator).tolist()


def save_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1
) -> Tensors:
    """Write `config.json` and safetensors, with an index if sharded (names as K3 sheet 3.3).

    Returns:
        The tensors as they were given.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return tensors
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


class Draw:
    """Draws named tensors in order from one seeded generator."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.tensors: Tensors = {}

    def normal(
        self,
        name: str,
        shape: Iterable[int],
        std: float,
        mean: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a normal tensor, in `dtype` or the common one."""
        values = mean + std * torch.randn(tuple(shape), generator=self.generator)
        self.tensors[name] = values.to(dtype or self.dtype)

    def linear(self, name: str, rows: int, columns: int) -> None:
        """Add a matrix that keeps the size of its input: std 1 / sqrt(columns)."""
        self.normal(name, (rows, columns), columns**-0.5)

    def gain(self, name: str, width: int, dtype: torch.dtype | None = None) -> None:
        """Add a norm weight around one."""
        self.normal(name, (width,), 0.2, mean=1.0, dtype=dtype)

    def uniform(self, shape: Iterable[int], low: float, high: float) -> Tensor:
        """Return uniform float32 values."""
        return low + (high - low) * torch.rand(tuple(shape), generator=self.generator)

    def integers(self, shape: Iterable[int], low: int, high: int) -> Tensor:
        """Return uniform integers of [low, high)."""
        return torch.randint(low, high, tuple(shape), generator=self.generator)

    def mxfp4(self, name: str, rows: int, columns: int, packed: bool) -> None:
        """Add an expert matrix with std about 1 / sqrt(columns) (K3 sheet 3.2)."""
        groups = columns // MXFP4_GROUP
        codes = self.integers((rows, groups, MXFP4_GROUP), 0, 16)
        place = self.integers((rows, groups, 1), 0, MXFP4_GROUP)
        large = torch.tensor(CODES_OF_LARGE_MAGNITUDES)[self.integers((rows, groups, 1), 0, 4)]
        codes = codes.scatter(2, place, large).reshape(rows, columns)
        exponent = round(math.log2(columns**-0.5 / 2.9))  # 2.9 = rms of the E2M1 values
        scale = (127 + exponent + self.integers((rows, groups), -1, 2)).to(torch.uint8)
        bytes_ = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        if packed:
            self.tensors[f"{name}.weight_packed"] = bytes_
            self.tensors[f"{name}.weight_scale"] = scale
        else:
            self.tensors[f"{name}.weight"] = decode_mxfp4(bytes_, scale).to(self.dtype)


def draw_decay(draw: Draw, heads: int, width: int, rates: tuple[float, float]) -> tuple:
    """Return A_log = log U(rates) [H] and dt_bias = softplus^-1(exp U(log .01, log 1)) [width].

    The same families as hybrid sheet 2.2, with ranges in which a toy model both keeps and forgets.
    """
    a_log = draw.uniform((heads,), *rates).log()
    dt = draw.uniform((width,), math.log(0.01), 0.0).exp()
    return a_log, dt + torch.log(-torch.expm1(-dt))


def draw_conv(draw: Draw, name: str, width: int, taps: int) -> None:
    """Add one depthwise convolution [width, 1, taps], F32 in the release."""
    draw.normal(name, (width, 1, taps), 0.5, dtype=torch.float32)


def draw_model(
    draw: Draw, at: str, text: Mapping[str, Any], layer: Callable[[str, int], None]
) -> None:
    """Add input table, layers, last norm and head; `layer` gets the prefix and number of each."""
    width = text["hidden_size"]
    draw.normal(f"{at}embed_tokens.weight", (text["vocab_size"], width), 1.0)
    for index in range(text["num_hidden_layers"]):
        layer(f"{at}layers.{index}.", index)
    draw.gain(f"{at}norm.weight", width)
    draw.linear("lm_head.weight", text["vocab_size"], width)


def draw_kda(
    draw: Draw, at: str, text: Mapping[str, Any], norm_dtype: torch.dtype | None = None
) -> None:
    """Add a KDA layer with low-rank decay and gate, `A_log` [H]."""
    linear, width = text["linear_attn_config"], text["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    inner = heads * dim
    for n in "qkv":
        draw.linear(f"{at}{n}_proj.weight", inner, width)
        draw_conv(draw, f"{at}{n}_conv1d.weight", inner, linear["short_conv_kernel_size"])
    for n in "fg":
        draw.linear(f"{at}{n}_a_proj.weight", dim, width)
        draw.linear(f"{at}{n}_b_proj.weight", inner, dim)
    draw.linear(f"{at}b_proj.weight", heads, width)
    decay = draw_decay(draw, heads, inner, (0.5, 4.0))
    draw.tensors[f"{at}A_log"], draw.tensors[f"{at}dt_bias"] = decay
    draw.gain(f"{at}o_norm.weight", dim, norm_dtype)
    draw.linear(f"{at}o_proj.weight", width, inner)


def draw_indexer(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    """Add the matrices and the key norm of an indexer."""
    width, heads, dim = text["hidden_size"], text["index_n_heads"], text["index_head_dim"]
    draw.linear(f"{at}wq_b.weight", heads * dim, text["q_lora_rank"])
    draw.linear(f"{at}wk.weight", dim, width)
    draw.gain(f"{at}k_norm.weight", dim)
    draw.normal(f"{at}k_norm.bias", (dim,), 0.2)
    draw.linear(f"{at}weights_proj.weight", heads, width)


def draw_q(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    """Add the query path of MLA, direct or low-rank."""
    if text["q_lora_rank"] is not None:
        draw_latent_q(draw, at, text)
        return
    dim = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    draw.linear(f"{at}q_proj.weight", text["num_attention_heads"] * dim, text["hidden_size"])


def draw_mlp(draw: Draw, at: str, width: int, inner: int) -> None:
    """Add gate, up and down projections."""
    draw.linear(f"{at}gate_proj.weight", inner, width)
    draw.linear(f"{at}up_proj.weight", inner, width)
    draw.linear(f"{at}down_proj.weight", width, inner)


def draw_router(draw: Draw, at: str, experts: int, width: int) -> None:
    """Add the router and its selection bias (F32)."""
    draw.linear(f"{at}gate.weight", experts, width)
    draw.normal(f"{at}gate.e_score_correction_bias", (experts,), 0.1, dtype=torch.float32)


def draw_latent_kv(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    """Add the key/value path and the output projection of MLA."""
    width, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rest, v_dim = (text[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    draw.linear(f"{at}kv_a_proj_with_mqa.weight", rank + rest, width)
    draw.gain(f"{at}kv_a_layernorm.weight", rank)
    draw.linear(f"{at}kv_b_proj.weight", heads * (nope + v_dim), rank)
    draw.linear(f"{at}o_proj.weight", width, heads * v_dim)


def draw_latent_q(draw: Draw, at: str, text: Mapping[str, Any]) -> None:
    """Add the low-rank query path of MLA."""
    rank, heads = text["q_lora_rank"], text["num_attention_heads"]
    dim = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    draw.linear(f"{at}q_a_proj.weight", rank, text["hidden_size"])
    draw.gain(f"{at}q_a_layernorm.weight", rank)
    draw.linear(f"{at}q_b_proj.weight", heads * dim, rank)


def layer_schedule(layers: int) -> dict[str, list[int]]:
    """Return the 1-based lists of a stack with MLA at i % 4 == 3 and last (K3 sheet 1.4)."""
    full = [i + 1 for i in range(layers) if i % 4 == 3 or i == layers - 1]
    return {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i not in full],
    }
