"""Sparse latent attention, forward and backward, beside transformers' DeepseekV32Attention.

Widths: hidden 512, 8 heads of 64 + 32 channels with values of 64, latents of 256, an indexer of 4
heads of 64 that keeps 2048 keys. Both sides hold the same weights and include their projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import MIB, Result, interleave, peak_extra_bytes, sgemm_rate
from trimtab.arch.load import load_arch
from trimtab.arch.spec import MLASpec
from trimtab.models.context import ForwardContext
from trimtab.models.mla import MLA
from trimtab.models.tape import ChoiceTape
from trimtab.ops.attention.cost import gather_us, tile_us
from trimtab.ops.attention.operators import ATTENTION, LatentKeys
from trimtab.ops.attention.packs import pack_borders
from trimtab.ops.attention.pooling import PoolRule
from trimtab.ops.attention.select import select
from trimtab.ops.backends import build_ops

HIDDEN, TOP_K, LENGTH = 512, 2048, 8192
CASE = f"sparse attention fwd+bwd T{LENGTH} H8 top {TOP_K}"
ERROR = 1e-5
Outcome = tuple[Tensor, Tensor, Any]


def _config(top_k: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": 64, "q_lora_rank": 256,
        "num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "kv_lora_rank": 256, "index_n_heads": 4,
        "index_head_dim": 64, "index_topk": top_k, "intermediate_size": 512,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "max_position_embeddings": 65536,
    }


def _inputs(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(length, HIDDEN, generator=generator) for _ in range(2))
    return x, grad


def _weights(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, shape in sorted(shapes.items()):
        made[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if "norm" in name:
            made[name] = made[name] * 0.1 + (0.0 if name.endswith("bias") else 1.0)
    return made


def ours(length: int, top_k: int = TOP_K, **ops: str) -> Callable[[], Outcome]:
    """Our layer; a call returns its output, the input's gradient and the selection."""
    spec = load_arch(_config(top_k), "benchmark").layers[0].mixer
    assert isinstance(spec, MLASpec)
    layer = MLA(spec, HIDDEN, 0, torch.float32, build_ops(ops))
    layer.load_state_dict(_weights({n: p.shape for n, p in layer.named_parameters()}))
    x, grad = _inputs(length)

    def call() -> Outcome:
        leaf = x.detach().requires_grad_()
        tape = ChoiceTape()
        y, _ = layer(leaf, None, ForwardContext.packed([length], tape=tape))
        y.backward(grad)
        assert leaf.grad is not None
        return y.detach(), leaf.grad, tape.choices[0, "selection"]

    return call


def theirs(length: int, top_k: int = TOP_K, forced: Tensor | None = None) -> Callable[[], Outcome]:
    """The same of transformers with its sdpa attention, weights frozen as ours.

    Args:
        length: tokens.
        top_k: keys per query.
        forced: [T, S] keys that replace those of its indexer.
    """
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

    config = DeepseekV32Config(**_config(top_k), attn_implementation="sdpa")
    layer = modeling.DeepseekV32Attention(config, 0).eval()
    layer.load_state_dict(_weights({n: p.shape for n, p in layer.named_parameters()}))
    layer.requires_grad_(False)
    if forced is not None:
        layer.indexer.register_forward_hook(lambda *_: forced.unsqueeze(0))
    x, grad = _inputs(length)
    positions = torch.arange(length).unsqueeze(0)
    tables = modeling.DeepseekV32RotaryEmbedding(config)(x, positions)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril_()

    def call() -> Outcome:
        leaf = x.detach().unsqueeze(0).requires_grad_()
        y = layer(leaf, tables, mask, position_ids=positions)[0]
        y.backward(grad.unsqueeze(0))
        assert leaf.grad is not None
        return y.detach()[0], leaf.grad[0], None

    return call


def check() -> Result:
    """Worst difference from transformers at a length it can afford, over all implementations.

    Transformers breaks ties between equal scores otherwise, so it is given our keys.
    """
    length, top_k, worst = 1000, 256, 0.0
    for name in ("gather", "native", "tiles"):
        y, dx, kept = ours(length, top_k, attention=name)()
        keys = kept.all_positions()
        # An unused slot names a key to come, which transformers masks.
        keys = torch.where(keys < 0, length - 1, keys)
        for mine, other in zip((y, dx), theirs(length, top_k, keys)(), strict=False):
            worst = max(worst, float((mine - other).abs().max() / other.abs().max()))
    return Result(f"sparse attention T{length} top {top_k}", "error against transformers", worst, ERROR, at_least=False)


def model_errors() -> list[Result]:
    """What the cost model says of both implementations, over what they take."""
    found = []
    for heads in (8, 64):
        length, s, k, v, rank, shared = 1024, 256, 192, 128, 512, 64
        borders = pack_borders((length,), torch.device("cpu"))
        index = [torch.randn(length, *sizes) for sizes in ((1, 16), (16,), (1,))]
        selection = select(*index, PoolRule(1, s, tail=False), borders)
        q, latent, part = (
            torch.randn(length, *sizes, requires_grad=True) for sizes in ((heads, k), (rank,), (shared,))
        )
        weight = torch.randn(heads, k - shared + v, rank) * rank**-0.5
        kv = torch.randn(length, heads, k - shared + v, requires_grad=True)
        keys = LatentKeys(latent, part, lambda kv=kv: kv, lambda weight=weight: weight, v)
        call = (q, keys, 0.07, borders, selection)
        sides = {
            op.implementations[0].name: lambda op=op, call=call: op(*call).sum().backward()
            for op in (ATTENTION.force("native"), ATTENTION.force("gather"))
        }
        mean = int((selection.all_positions() >= 0).sum()) // length
        said = {
            "native": tile_us(borders.mean_visible, heads, k, v),
            "gather": gather_us(mean, heads, k, v, rank, shared),
        }
        for name, timing in interleave(sides, 2).items():
            took = timing.median / length * 1e6
            case = f"cost model T{length} H{heads} S{s}, {name}"
            details = {"us_per_query": round(took), "model_us_per_query": round(said[name])}
            found.append(Result(case, "measured over model", took / said[name], details=details))
    return found


def run() -> list[Result]:
    """Correctness, then time and memory beside transformers."""
    results = [check()]
    if not results[0].passed:
        return results
    sides = {
        "ours": ours(LENGTH), "ours, PyTorch only": ours(LENGTH, attention="tiles", indexer="blocks"),
        "transformers": theirs(LENGTH),
    }
    times = interleave(sides, 3, once=frozenset({"transformers"}))
    peer = times["transformers"].median
    for name in ("ours", "ours, PyTorch only"):
        details = {"seconds": times[name].seconds, "peer_seconds": times["transformers"].seconds}
        speed = peer / times[name].median
        results.append(Result(f"{CASE}, {name}", "speed over transformers", speed, 3.0, details=details))
    mine, other = peak_extra_bytes(ours, LENGTH), peak_extra_bytes(theirs, LENGTH)
    details = {"mib": round(mine / MIB), "peer_mib": round(other / MIB)}
    results.append(Result(CASE, "extra memory, transformers over ours", other / mine, 10.0, details=details))
    flops = 2 * _pairs(LENGTH) * 8 * (4 * 96 + 3 * 64)
    share = flops / times["ours"].median / sgemm_rate()
    results.append(Result(CASE, "share of the sgemm rate (attention FLOPs)", share))
    return results + model_errors()


def _pairs(length: int) -> int:
    return pack_borders((length,), torch.device("cpu")).visited_pairs
