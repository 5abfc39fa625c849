"""What one layer computes for one micro-batch: FLOPs, bytes and kernels of each operator.

Knows: the operators of every mixer and feed-forward block. Does not know: speeds, networks.

FLOPs are counted from the matrices that are multiplied, two per multiply and add. Causal attention
counts half the square of the sequence. One token of a chunked delta rule costs, per head, four
products inside its chunk of 64 and three with the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trimtab.arch.outline import GatedDeltaSpec, GQASpec, Outline, OutlineLayer
from trimtab.arch.spec import AttnRes, DenseSpec, KDASpec, MLASpec, MoESpec
from trimtab.plan.job import Job
from trimtab.plan.kept import routed_width
from trimtab.plan.placement import Degrees

Kind = Literal["gemm", "grouped", "attention", "linear_attention", "vector"]

_X = 2
_CHUNK = 64
_PACKED_BYTES = 0.53125  # 4.25 bits


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of one layer on one rank and micro-batch.

    Args:
        name: what it is.
        kind: which efficiency it has.
        flops: of the forward pass.
        bytes: moved in the forward pass.
        trained: its weights get a gradient.
        adapter_flops: of the LoRA pair, forward.
        backward: FLOPs of the backward pass without weight gradients, over forward.
        again: selective recomputation that runs it twice, "" for none.
        rows: of a matrix product, per expert of a grouped one; 0 elsewhere.
        decoded: bytes of packed weights written out in bf16 before they are used.
        kernels: launched.
    """

    name: str
    kind: Kind
    flops: float
    bytes: float
    trained: bool = False
    adapter_flops: float = 0.0
    backward: float = 1.0
    again: str = ""
    rows: float = 0.0
    decoded: float = 0.0
    kernels: int = 1


class Work:
    """Operators of a model and a job.

    Args:
        outline: the model.
        job: what is run.
    """

    def __init__(self, outline: Outline, job: Job) -> None:
        self.outline, self.job = outline, job
        self._rank = job.adapters.rank if job.trains_adapters and job.adapters else 0

    def tokens(self, degrees: Degrees) -> float:
        """Tokens of a micro-batch on one rank, before tensor parallelism."""
        return self.job.micro_batch * self.job.seq_len / degrees.cp

    def layer(self, layer: OutlineLayer, degrees: Degrees) -> tuple[Op, ...]:
        """Operators of one decoder layer."""
        tokens = self.tokens(degrees)
        ops = [*self._mixer(layer.mixer, degrees, tokens), *self._ffn(layer, degrees, tokens)]
        d = self.outline.hidden_size
        passes = 12.0
        if isinstance(self.outline.residual, AttnRes):
            blocks = -(-self.outline.num_layers // self.outline.residual.block_size)
            passes += 2 * (blocks / 2 + 2)
        ops.append(Op("norms and residual", "vector", 0, passes * _X * d * tokens / degrees.tp,
                      backward=2.0, again="layernorm", kernels=6))
        return tuple(ops)

    def head(self, degrees: Degrees) -> tuple[Op, ...]:
        """Output head and loss."""
        tokens, d = self.tokens(degrees), self.outline.hidden_size
        vocab = self.outline.vocab_size / degrees.tp
        trained = self.job.method == "full"
        return (
            Op("output head", "gemm", 2 * tokens * vocab * d, _X * (vocab * d + tokens * (vocab + d)),
               trained, rows=tokens),
            Op("loss", "vector", 0, 12 * tokens * vocab, backward=1.0, kernels=4),
        )

    def _linear(
        self, name: str, leaf: str, rows: float, columns: float, tokens: float, again: str = "",
    ) -> Op:
        flops = 2 * tokens * rows * columns
        size = _X * (rows * columns + tokens * (rows + columns))
        adapted = self.job.adapted(leaf)
        pair = 2 * tokens * self._rank * (rows + columns) if adapted else 0.0
        return Op(name, "gemm", flops, size, adapted and self.job.method == "full", pair,
                  again=again, rows=tokens, kernels=1 + 3 * (pair > 0))

    def _mixer(self, mixer: object, degrees: Degrees, tokens: float) -> Iterator[Op]:
        if isinstance(mixer, GQASpec):
            yield from self._gqa(mixer, degrees, tokens)
        elif isinstance(mixer, MLASpec):
            yield from self._mla(mixer, degrees, tokens)
        elif isinstance(mixer, KDASpec):
            yield from self._kda(mixer, degrees, tokens)
        elif isinstance(mixer, GatedDeltaSpec):
            yield from self._gated_delta(mixer, degrees, tokens)

    def _gqa(self, m: GQASpec, degrees: Degrees, tokens: float) -> Iterator[Op]:
        d, tp = self.outline.hidden_size, degrees.tp
        q, kv = m.num_heads * m.head_dim / tp, max(m.num_kv_heads, tp) * m.head_dim / tp
        yield self._linear("query, key, value", "gqa/q_proj", q * (1 + m.gate) + 2 * kv, d, tokens)
        yield self._softmax("attention", m.num_heads / tp, 2 * m.head_dim, tokens, m.window)
        yield Op("rotation and norms", "vector", 0, _X * 6 * (q + 2 * kv) * tokens, backward=1.5,
                 kernels=4)
        yield self._linear("attention output", "gqa/o_proj", d, q, tokens)

    def _softmax(
        self, name: str, heads: float, width: float, tokens: float, seen: int | None
    ) -> Op:
        keys = self.job.seq_len / 2
        if seen is not None:
            keys = min(keys, seen)
        flops = 2 * tokens * keys * heads * width
        return Op(name, "attention", flops, _X * tokens * heads * width * 2, backward=2.5,
                  again="core_attn")

    def _mla(self, m: MLASpec, degrees: Degrees, tokens: float) -> Iterator[Op]:
        d, tp = self.outline.hidden_size, degrees.tp
        n, latent = m.num_heads / tp, m.kv_lora_rank
        q_width = n * m.qk_head_dim
        # The down projections are on every rank, each for its part of the sequence.
        part = tokens / tp
        if m.q_lora_rank is None:
            yield self._linear("query", "mla/q_proj", q_width, d, tokens)
        else:
            yield self._linear("query latent", "mla/q_a_proj", m.q_lora_rank, d, part)
            yield self._linear("query", "mla/q_b_proj", q_width, m.q_lora_rank, tokens, "mla_up_proj")
        rows = latent + m.qk_rope_head_dim
        yield self._linear("key latent", "mla/kv_a_proj_with_mqa", rows, d, part)
        up = n * (m.qk_nope_head_dim + m.v_head_dim)
        yield self._linear("key, value", "mla/kv_b_proj", up, latent, tokens, "mla_up_proj")
        if m.indexer is None:
            yield self._softmax("attention", n, m.qk_head_dim + m.v_head_dim, tokens, None)
        else:
            wide = 2 * latent + m.qk_rope_head_dim
            yield self._softmax("sparse attention", n, wide, tokens, m.indexer.top_k)
            if m.indexer.share == "full":
                keys = self.job.seq_len / 2 / (m.indexer.pool or 1)
                flops = 2 * tokens * keys * m.indexer.heads * m.indexer.dim
                yield Op("indexer", "attention", flops, 4 * tokens * keys, backward=0.0,
                         again="core_attn", kernels=3)
        out = n * m.v_head_dim
        if m.gate is not None:
            gate_rows = out if m.gate == "channel" else n
            yield self._linear("output gate", "mla/g_proj", gate_rows, d, tokens)
        yield Op("latent norms, rotation", "vector", 0, _X * 4 * (q_width + out) * tokens,
                 backward=1.5, kernels=6)
        yield self._linear("attention output", "mla/o_proj", d, out, tokens)

    def _kda(self, m: KDASpec, degrees: Degrees, tokens: float) -> Iterator[Op]:
        d, tp = self.outline.hidden_size, degrees.tp
        p, heads, dim = m.width / tp, m.num_heads / tp, m.head_dim
        yield self._linear("query, key, value", "kda/q_proj", 3 * p, d, tokens)
        if m.gate_rank is None:
            yield self._linear("output gate", "kda/g_proj", p, d, tokens)
        else:
            yield self._linear("output gate", "kda/g_b_proj", p, m.gate_rank, tokens)
        inner = m.decay_rank or d
        yield self._linear("decay", "kda/f_b_proj", p, inner, tokens)
        yield Op("convolutions and gates", "vector", 0, _X * 16 * p * tokens, backward=2.0, kernels=8)
        yield self._delta_rule(heads, dim, dim, tokens)
        yield self._linear("attention output", "kda/o_proj", d, p, tokens)

    def _delta_rule(self, heads: float, key: int, value: int, tokens: float) -> Op:
        inner = 2 * _CHUNK * (2 * key + 2 * value)
        flops = tokens * heads * (inner + 3 * 2 * key * value)
        moved = tokens * heads * (_X * (4 * key + 3 * value) + 8 * key * value / _CHUNK)
        times = 12.0 if self.job.kernels == "plain" else 1.0
        return Op("delta rule", "linear_attention", flops, moved * times, backward=2.5,
                  again="core_attn", kernels=6)

    def _gated_delta(self, m: GatedDeltaSpec, degrees: Degrees, tokens: float) -> Iterator[Op]:
        d, tp = self.outline.hidden_size, degrees.tp
        key, value = m.key_heads * m.key_dim / tp, m.value_heads * m.value_dim / tp
        wide = 2 * key + 2 * value
        yield self._linear("query, key, value, gate", "gated_delta/in_proj_qkvz", wide, d, tokens)
        yield Op("convolution and gates", "vector", 0, _X * 10 * (2 * key + value) * tokens,
                 backward=2.0, kernels=6)
        yield self._delta_rule(m.value_heads / tp, m.key_dim, m.value_dim, tokens)
        yield self._linear("attention output", "gated_delta/out_proj", d, value, tokens)

    def _ffn(self, layer: OutlineLayer, degrees: Degrees, tokens: float) -> Iterator[Op]:
        ffn, d, tp = layer.ffn, self.outline.hidden_size, degrees.tp
        if isinstance(ffn, DenseSpec):
            f = ffn.intermediate_size / tp
            yield from self._glu("ffn", "dense_ffn", f, tokens, "mlp", layer.gated)
            return
        if ffn.shared_intermediate_size:
            shared = ffn.shared_intermediate_size / tp
            yield from self._glu("shared expert", "shared_expert", shared, tokens, "", layer.gated)
        part = tokens / tp
        yield self._linear("router", "router/router", ffn.num_experts, d, part)
        if ffn.latent is not None:
            size = ffn.latent.size
            yield self._linear("latent down", "latent/latent_down", size, d, part)
            yield self._linear("latent up", "latent/latent_up", d, size, part)
        yield from self._experts(layer, ffn, degrees, part)

    def _glu(
        self, name: str, owner: str, f: float, tokens: float, again: str, gated: bool
    ) -> Iterator[Op]:
        d, wide = self.outline.hidden_size, (2 if gated else 1) * f
        yield self._linear(f"{name} gate and up", f"{owner}/gate_proj", wide, d, tokens, again)
        yield Op(f"{name} activation", "vector", 0, _X * 3 * f * tokens, backward=1.7,
                 again=again or "moe_act")
        yield self._linear(f"{name} down", f"{owner}/down_proj", d, f, tokens)

    def _experts(
        self, layer: OutlineLayer, ffn: MoESpec, degrees: Degrees, part: float
    ) -> Iterator[Op]:
        job, width = self.job, routed_width(layer, self.outline.hidden_size)
        f, matrices = ffn.intermediate_size / degrees.etp, 3 if layer.gated else 2
        part *= degrees.etp
        load = job.routing if degrees.ep > 1 else 1.0
        if job.capacity_factor is not None:
            load = min(load, job.capacity_factor)
        rows, local = part * ffn.top_k * load, ffn.num_experts / degrees.ep
        weights = matrices * f * width * local
        packed = job.base_dtype == "native" and ffn.form == "mxfp4" and job.method != "full"
        size = weights * (_PACKED_BYTES if packed else _X) + _X * rows * (2 * width + 4 * f)
        pair = 0.0
        if job.adapters is not None and job.adapters.experts != "none" and job.method == "lora":
            pair = 2 * rows * self._rank * (2 * width + 3 * f)
        yield Op("experts", "grouped", 2 * matrices * rows * f * width, size, job.method == "full", pair,
                 again="moe", rows=rows / local, decoded=_X * weights if packed else 0.0, kernels=4)
        yield Op("expert activation", "vector", 0, _X * 3 * f * rows, backward=1.7, again="moe_act")
        yield Op("permutation", "vector", 0, _X * 6 * width * rows, backward=1.0, kernels=8)
