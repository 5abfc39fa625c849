"""What one layer keeps of one micro-batch for its backward pass, tensor by tensor.

Knows: which tensors autograd needs, which of them only for the gradient of a weight, and what
selective recomputation drops. Does not know: pipelines, model state.

Three rules decide for LoRA: the input of a frozen matrix is not kept, that of an adapted one is
(A needs it), and what a nonlinearity needs is kept in any case. Sizes are bytes per token of one
rank: `sp` tensors are divided by tp along the sequence, `tp` tensors by heads or channels.

Activation bytes of dense layers: Korthikanti et al., arXiv 2205.05198, with the tensors counted
one by one for gated feed-forward blocks and flash attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.arch.outline import GatedDeltaSpec, GQASpec, OutlineLayer
from trimtab.arch.spec import (
    AttnRes,
    DenseSpec,
    HyperConnections,
    KDASpec,
    MLASpec,
    MoESpec,
)
from trimtab.plan.job import Job

_X = 2  # bytes of an activation
# Bytes per channel that linear attention keeps without fused kernels: 109 GiB a layer of 12288
# channels and 8192 tokens as published, of which 10.2 GiB with them.
_PLAIN_KDA = 1054


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor that is kept.

    Args:
        name: what it is.
        bytes: per token of the micro-batch on this rank, per routed row where `routed`.
        part: selective recomputation that drops it, "" for none.
        routed: counted per row that experts of this rank receive.
    """

    name: str
    bytes: float
    part: str = ""
    routed: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What the sizes depend on beside the layer.

    Args:
        hidden: D.
        tp: degree of tensor parallelism.
        cp: degree of context parallelism.
        etp: degree of tensor parallelism inside experts.
        gated: feed-forward blocks have a gate.
    """

    hidden: int
    tp: int
    cp: int
    etp: int = 1
    gated: bool = True


def kept_tensors(
    layer: OutlineLayer, shape: Shape, job: Job, residual: object
) -> tuple[Kept, ...]:
    """Everything one layer keeps, selective recomputation not yet applied."""
    if "other_products" in job.recompute.selective and isinstance(layer.mixer, GQASpec) and (
        isinstance(layer.ffn, DenseSpec)
    ):
        return tuple(_other_products(layer.mixer, layer.ffn, shape))
    return tuple(_layer(layer, shape, job, residual))


def kept_bytes(tensors: tuple[Kept, ...], tokens: float, rows: float, drop: frozenset[str]) -> float:
    """Bytes of one layer.

    Args:
        tensors: of `kept_tensors`.
        tokens: of the micro-batch on this rank before tensor parallelism.
        rows: routed rows that this rank's experts receive.
        drop: parts that are computed again.
    """
    return sum(t.bytes * (rows if t.routed else tokens) for t in tensors if t.part not in drop)


def routed_width(layer: OutlineLayer, hidden: int) -> int:
    """Channels of a routed row."""
    ffn = layer.ffn
    if isinstance(ffn, MoESpec) and ffn.latent is not None:
        return ffn.latent.size
    return hidden


def _layer(layer: OutlineLayer, s: Shape, job: Job, residual: object) -> Iterator[Kept]:
    d = _X * s.hidden / (s.tp if job.stack.sequence_parallel else 1)
    if isinstance(residual, AttnRes):
        # The stream at both sites of the mix; its bank is counted once per micro-batch.
        yield Kept("residual mix", 2 * d)
    if isinstance(residual, HyperConnections):
        yield Kept("residual streams", 2 * residual.streams * d)
    yield Kept("attention norm input", d)
    yield from _mixer(layer.mixer, s, job, d)
    yield Kept("ffn norm input", d)
    yield from _ffn(layer.ffn, s, job, d)
    if job.dropout:
        yield Kept("masks of what is added", 2 * d / _X)


def _other_products(m: GQASpec, ffn: DenseSpec, s: Shape) -> Iterator[Kept]:
    """The layer's input, attention, and the first, third and every other of its products."""
    d, q = _X * s.hidden / s.tp, _X * m.num_heads * m.head_dim / s.tp
    yield Kept("layer input", d)
    yield Kept("query and value", q + _X * max(1.0, m.num_kv_heads / s.tp) * m.head_dim)
    yield Kept("attention output", q)
    yield Kept("softmax sums", 4 * m.num_heads / s.tp)
    yield Kept("gate", _X * ffn.intermediate_size / s.tp)
    yield Kept("ffn output", d)


def _input(job: Job, name: str, size: float, leaves: tuple[str, ...], part: str = "") -> Iterator[Kept]:
    """The input of projections, kept where one of them is trained, in the precision of products."""
    if any(job.adapted(leaf) for leaf in leaves):
        yield Kept(name, size * _input_share(job), part)


def _input_share(job: Job) -> float:
    """Bytes of a kept input of a trained product over those of an activation."""
    return 0.5 if job.precision != "bf16" and job.method == "full" else 1.0


def _mixer(mixer: object, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    if isinstance(mixer, GQASpec):
        yield from _gqa(mixer, s, job, d)
    elif isinstance(mixer, MLASpec):
        yield from _mla(mixer, s, job, d)
    elif isinstance(mixer, KDASpec):
        yield from _kda(mixer, s, job, d)
    elif isinstance(mixer, GatedDeltaSpec):
        yield from _gated_delta(mixer, s, job, d)


def _exchanged(s: Shape, size: float) -> Iterator[Kept]:
    """Context parallelism by all-to-all keeps the output before it is sent back, too."""
    if s.cp > 1:
        yield Kept("attention output by heads", size, "core_attn")


def _gqa(m: GQASpec, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    q, kv = m.num_heads * m.head_dim / s.tp, max(1.0, m.num_kv_heads / s.tp) * m.head_dim
    leaves = ("gqa/q_proj", "gqa/k_proj", "gqa/v_proj")
    yield from _input(job, "attention norm output", d, leaves, "layernorm")
    if m.qk_norm:
        yield Kept("query and key before their norm", _X * (q + kv))
    yield Kept("query, key, value", _X * (q + 2 * kv))
    if m.gate:
        yield Kept("output gate and its input", _X * 2 * q)
    yield from _exchanged(s, _X * q)
    yield from _context(_X * q, job, "gqa/o_proj")
    yield _weights(m.num_heads / s.tp, job)


def _context(size: float, job: Job, projection: str) -> Iterator[Kept]:
    """The output of attention, which its backward pass needs and that of a trained projection.

    In one precision they share it, so that recomputing attention saves nothing of it; narrow
    products keep their input beside it.
    """
    if not job.adapted(projection):
        yield Kept("attention output", size, "core_attn")
    elif _input_share(job) == 1.0:
        yield Kept("attention output", size)
    else:
        yield Kept("attention output", size, "core_attn")
        yield Kept("input of the output projection", size * _input_share(job))


def _weights(heads: float, job: Job) -> Kept:
    """What the softmax keeps of its weights: their sums, or in plain attention all of them.

    Dropout keeps its mask and what it passes on beside them.
    """
    if job.attention == "fused":
        return Kept("softmax sums", 4 * heads, "core_attn")
    size = (2 * _X + 1 if job.dropout else _X) * job.seq_len
    return Kept("attention weights", size * heads, "core_attn")


def _mla(m: MLASpec, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    n = m.num_heads / s.tp
    q_in, latent = m.q_lora_rank or 0, m.kv_lora_rank
    leaves = ("mla/q_a_proj", "mla/q_proj", "mla/kv_a_proj_with_mqa", "mla/g_proj")
    yield from _input(job, "attention norm output", d, leaves, "layernorm")
    # Latents are divided along the sequence as the norm's output is.
    yield Kept("latents", _X * (q_in + latent + m.qk_rope_head_dim) / s.tp)
    yield from _input(job, "normed query latent", _X * q_in / s.tp, ("mla/q_b_proj",), "mla_up_proj")
    yield from _input(job, "normed key latent", _X * latent / s.tp, ("mla/kv_b_proj",), "mla_up_proj")
    yield Kept("query and key", _X * 2 * n * m.qk_head_dim, "mla_up_proj")
    yield Kept("value", _X * n * m.v_head_dim, "mla_up_proj")
    yield from _exchanged(s, _X * n * m.v_head_dim)
    if m.gate is None:
        yield from _context(_X * n * m.v_head_dim, job, "mla/o_proj")
    else:
        yield Kept("attention output", _X * n * m.v_head_dim, "core_attn")
    yield _weights(n, job)
    if m.gate is not None:
        wide = n * m.v_head_dim
        yield Kept("output gate", _X * (wide if m.gate == "channel" else n))
        yield from _input(job, "gated output", _X * wide, ("mla/o_proj",))
    if m.indexer is not None:
        yield Kept("selected key ids", 4 * m.indexer.top_k if m.indexer.share == "full" else 0)


def _kda(m: KDASpec, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    p, heads = m.width / s.tp, m.num_heads / s.tp
    leaves = tuple(f"kda/{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj"))
    yield from _input(job, "attention norm output", d, leaves, "layernorm")
    yield Kept("inputs of the convolutions", _X * 3 * p)
    yield Kept("query, key, value", _X * 3 * p, "core_attn")
    yield Kept("decay and its logits", (_X + 4) * p, "core_attn")
    yield Kept("beta", 4 * heads, "core_attn")
    # Two lower triangles per chunk of 64 tokens.
    yield Kept("chunk matrices", _X * 2 * 64 * heads, "core_attn")
    yield Kept("attention output and gate", _X * 2 * p)
    yield from _input(job, "gated output", _X * p, ("kda/o_proj",))
    if job.kernels == "plain":
        yield Kept("unfused intermediates", _PLAIN_KDA * p)


def _gated_delta(m: GatedDeltaSpec, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    key, value = m.key_heads * m.key_dim / s.tp, m.value_heads * m.value_dim / s.tp
    leaves = ("gated_delta/in_proj_qkvz", "gated_delta/in_proj_ba")
    yield from _input(job, "attention norm output", d, leaves, "layernorm")
    yield Kept("inputs of the convolution", _X * (2 * key + value))
    # Queries and keys are repeated to the number of value heads.
    yield Kept("query, key, value", _X * 3 * value, "core_attn")
    yield Kept("decay and beta", 8 * m.value_heads / s.tp, "core_attn")
    yield Kept("chunk matrices", _X * 2 * 64 * m.value_heads / s.tp, "core_attn")
    yield Kept("attention output and gate", _X * 2 * value, "gdn_norm_out")
    yield from _input(job, "gated output", _X * value, ("gated_delta/out_proj",), "gdn_norm_out")


def _ffn(ffn: DenseSpec | MoESpec, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    if isinstance(ffn, DenseSpec):
        leaves = ("dense_ffn/gate_proj", "dense_ffn/up_proj")
        yield from _input(job, "ffn norm output", d, leaves, "layernorm")
        yield from _glu(ffn.intermediate_size / s.tp, s, job, "dense_ffn", "mlp", "mlp_act")
        return
    yield from _moe(ffn, s, job, d)


def _glu(
    f: float, s: Shape, job: Job, owner: str, part: str, act_part: str
) -> Iterator[Kept]:
    yield Kept("gate and up" if s.gated else "up", _X * (2 if s.gated else 1) * f, part)
    yield from _input(job, "activated", _X * f, (f"{owner}/down_proj",), act_part)


def _moe(m: MoESpec, s: Shape, job: Job, d: float) -> Iterator[Kept]:
    f, e = m.intermediate_size / s.etp, m.num_experts
    dense = ["shared_expert/gate_proj", "shared_expert/up_proj", "latent/latent_down", "router/router"]
    yield from _input(job, "ffn norm output", d, tuple(dense), "layernorm")
    # Scores and their fp32 logits, the map of choices and the chosen weights.
    yield Kept("router", (4 + 4 + 1) * e / s.tp + 8 * m.top_k / s.tp)
    if m.latent is not None:
        yield Kept("latent norm input and output", _X * 2 * m.latent.size / s.tp)
    width = m.latent.size if m.latent is not None else None
    rows = _X * (width if width is not None else s.hidden)
    if job.adapted("routed_expert/gate_up"):
        yield Kept("expert input", rows * _input_share(job), "moe", routed=True)
    yield Kept("expert gate and up", _X * (2 if s.gated else 1) * f, "moe", routed=True)
    if not s.gated:
        # Without the fused gate, the routing weights are multiplied in a step of their own.
        yield Kept("expert activated, unweighted", _X * f, "moe_act", routed=True)
    if job.adapted("routed_expert/down"):
        yield Kept("expert activated", _X * f * _input_share(job), "moe_act", routed=True)
    yield Kept("routing weights and order", 12, "moe", routed=True)
    if m.shared_intermediate_size:
        shared = m.shared_intermediate_size / s.tp
        yield from _glu(shared, s, job, "shared_expert", "shared_experts", "moe_act")
