"""Peak memory of a fine-tuning run of Trimtab on one device, before it is started.

Knows: what Trimtab's own operators keep for the backward pass and work in, tensor by tensor. Does
not know: torch, other programs (see `kept`), several devices (see `memory`).

The experts keep their input, and gate and up of all rows where those are few, else they compute a
row again; attention keeps its output and the log-sum-exp of each row; the loss its finished gradient.
A frozen matrix keeps nothing, an adapted one its input and the rank-wide product in between. A layer
that is computed again keeps its input; under selective recomputation also what its routed experts and
its latent attention gave, see `trimtab.ops.keep`.

Letters: T tokens of a micro-batch, D hidden, P heads times width, S streams, A active experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.spec import (
    ArchSpec,
    AttnRes,
    DenseSpec,
    HyperConnections,
    KDASpec,
    LayerSpec,
    MLASpec,
    MoESpec,
)
from trimtab.plan.own_moments import EXPERT_KEPT, Moment, ffn_moment, loss_bytes, mixer_moment

Recompute = Literal["none", "layer", "selective"]

_WIDE = 4  # islands, and all adapters
_INDEX = 8
_SEGMENT = 256  # tokens per kept state of linear attention
# Of an element whose place in a dropout mask is worked out: four int64 that live at one time.
_MASK_WORK = 32


@dataclass(frozen=True, slots=True)
class RunShape:
    """What a step's memory depends on beside model and adapters.

    Args:
        tokens: T, of one forward and backward pass.
        sequence: of one record at most; blocks of attention scores are as wide.
        recompute: what is computed again in the backward pass, as in recipes.
        width: bytes of an activation, 4 on a CPU.
        supervised: share of the tokens that enter the loss.
        gathers: layers whose sparse attention fetches selected latents and makes no keys per head.
        dropout: adapters drop features of their inputs.
    """

    tokens: int
    sequence: int
    recompute: Recompute
    width: int = 4
    supervised: float = 1.0
    gathers: frozenset[int] = frozenset()
    dropout: bool = False


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Peak of a step above what the loaded model with its adapters takes.

    Args:
        lines: bytes by name; they sum to the peak.
        layer: decoder layer whose backward pass is at work at the peak, None in the loss.
    """

    lines: dict[str, float] = field(default_factory=dict)
    layer: int | None = None

    @property
    def peak(self) -> float:
        """Bytes above those before the first step."""
        return sum(self.lines.values())


def predict_run(arch: ArchSpec, targets: Sequence[LoRATarget], run: RunShape) -> RunMemory:
    """Peak memory of a run's steps, in bytes above the process before the first one.

    Args:
        arch: of the base.
        targets: the adapters of the run.
        run: sizes.
    """
    return _Model(arch, targets, run).peak()


def kept_by_layer(
    arch: ArchSpec, targets: Sequence[LoRATarget], run: RunShape
) -> tuple[float, ...]:
    """Bytes that each layer keeps for its backward pass, once it has been computed again if it is."""
    model = _Model(arch, targets, run)
    return tuple(model.kept(index) for index in range(arch.num_layers))


def results_by_layer(
    arch: ArchSpec, targets: Sequence[LoRATarget], run: RunShape
) -> tuple[float, ...]:
    """Bytes that selective recomputation keeps of each layer between the passes, beside its input."""
    model = _Model(arch, targets, run)
    return tuple(model.results(index) for index in range(arch.num_layers))


def adapter_elements(target: LoRATarget) -> int:
    """Elements of A and B."""
    lead_a, lead_b = ((), ()) if target.experts is None else (target.experts.lead("A"), target.experts.lead("B"))
    a = prod(lead_a) * target.in_features
    return target.rank * (a + prod(lead_b) * target.out_features)


class _Model:
    def __init__(self, arch: ArchSpec, targets: Sequence[LoRATarget], run: RunShape) -> None:
        self.arch, self.run, self.targets = arch, run, targets
        self.ranks: dict[int, dict[str, int]] = {}
        self.inputs: dict[int, dict[str, int]] = {}
        self.experts: dict[int, int] = {}
        self.sums: dict[int, int] = {}  # ranks in front of a B that all experts of a layer share
        for target in targets:
            if target.layer is None:
                continue
            if target.experts is None:
                name = target.fqn.split(".", 2)[2]
                self.ranks.setdefault(target.layer, {})[name] = target.rank
                self.inputs.setdefault(target.layer, {})[name] = target.in_features
            else:
                self.experts[target.layer] = self.experts.get(target.layer, 0) + adapter_elements(target)
                if target.experts.shares("B"):
                    self.sums[target.layer] = target.rank

    def peak(self) -> RunMemory:
        """The largest of the moments: the loss, and the backward pass of each layer."""
        kept = [self.kept(i) for i in range(self.arch.num_layers)]
        found = [self._at_loss(kept)]
        found += [self._at_layer(i, kept) for i in range(self.arch.num_layers)]
        most = max(found, key=lambda memory: memory.peak)
        moments = 2.0 * _WIDE * sum(map(adapter_elements, self.targets))
        return RunMemory({"moments": moments} | most.lines, most.layer)

    def _gradients(self, index: int) -> float:
        """Of the adapters from a layer to the last, which the backward pass reaches first."""
        found = (t for t in self.targets if t.layer is not None and t.layer >= index)
        return float(_WIDE * sum(map(adapter_elements, found)))

    def _at_loss(self, kept: list[float]) -> RunMemory:
        lines = self._below(self.arch.num_layers, kept)
        d, t = self.arch.hidden_size * self.run.width, self.run.tokens
        rows = t * self.run.supervised
        # The stream and its norm; the rows that enter the loss, and their gradient.
        lines["working_set"] = 3.0 * d * t
        lines["loss"] = 2.0 * d * rows + loss_bytes(
            rows, self.arch.hidden_size, self.arch.vocab_size
        )
        return RunMemory(lines)

    def _at_layer(self, index: int, kept: list[float]) -> RunMemory:
        lines = {"gradients": self._gradients(index), **self._below(index, kept)}
        layer, t = self.arch.layers[index], self.run.tokens
        stream = self._stream() * t
        mixer, ffn = self._mixer_kept(index, layer), self._ffn_kept(index, layer)
        sites = kept[index] - mixer - ffn
        moments = (
            (mixer + ffn + sites, self._ffn_moment(index, layer)),
            (mixer + sites / 2, self._mixer_moment(index, layer)),
        )
        alive, moment = max(moments, key=lambda pair: pair[0] + pair[1].bytes)
        # The layer's input is among what it keeps; computed again it is the border below. Of the results
        # that are kept only what the experts gave is not among it.
        if self.run.recompute == "none":
            lines["kept_activations"] += alive
        else:
            lines["recomputed_layer"] = alive
        if self.run.recompute == "selective":
            lines["kept_results"] += self._experts_result(index)
        lines["working_set"] = moment.bytes + self._stream_gradients(index) * t + stream
        if self.run.dropout:
            widest = max(self.inputs.get(index, {}).values(), default=0)
            lines["dropout_masks"] = float(_MASK_WORK * widest * t)
        return RunMemory(lines, index)

    def _below(self, index: int, kept: list[float]) -> dict[str, float]:
        """Kept by the layers before one, or what recomputation keeps of them."""
        bank = {"residual_bank": self._bank(index)}
        if self.run.recompute == "none":
            return {"kept_activations": sum(kept[:index])} | bank
        borders = {"kept_activations": self._stream() * self.run.tokens * index}
        if self.run.recompute == "layer":
            return borders | bank
        return borders | {"kept_results": sum(map(self.results, range(index)))} | bank

    def _stream(self) -> float:
        residual = self.arch.residual
        streams = residual.streams if isinstance(residual, HyperConnections) else 1
        return self.run.width * self.arch.hidden_size * float(streams)

    def _bank(self, index: int) -> float:
        """Banked rows beside the borders, which are kept of every layer without recomputation, too."""
        residual = self.arch.residual
        if not isinstance(residual, AttnRes):
            return 0.0
        return self.run.width * self.arch.hidden_size * self.run.tokens

    def _stream_gradients(self, index: int) -> float:
        """Gradients of the stream: of every banked row, too, where the stream is mixed."""
        residual = self.arch.residual
        if isinstance(residual, AttnRes):
            return self._stream() * (1 + index // residual.block_size)
        return self._stream()

    def kept(self, index: int) -> float:
        """Bytes that one layer keeps for its backward pass."""
        layer = self.arch.layers[index]
        return self._sites(index) + self._mixer_kept(index, layer) + self._ffn_kept(index, layer)

    def results(self, index: int) -> float:
        """Bytes that selective recomputation keeps of one layer between the passes."""
        mixer = self.arch.layers[index].mixer
        each = _WIDE * float(self.sums.get(index, 0))
        if isinstance(mixer, MLASpec):
            each += self._attention_result(mixer)
        return each * self.run.tokens + self._experts_result(index)

    def _attention_result(self, m: MLASpec) -> float:
        """Output of attention and log-sum-exp, of a token."""
        return _WIDE * m.num_heads * (m.v_head_dim + 1.0)

    def _experts_result(self, index: int) -> float:
        """What a layer's routed experts gave, which their backward pass does not read."""
        ffn = self.arch.layers[index].ffn
        if not isinstance(ffn, MoESpec):
            return 0.0
        inner = ffn.latent.size if ffn.latent is not None else self.arch.hidden_size
        return float(self.run.width * inner * self.run.tokens)

    def _sites(self, index: int) -> float:
        """Both norms' inputs, and what reading and writing the stream keeps."""
        residual, t = self.arch.residual, self.run.tokens
        d = self.run.width * self.arch.hidden_size
        each = d + _WIDE
        if isinstance(residual, AttnRes):
            each += d + 3 * _WIDE * (2 + index // residual.block_size)
        elif isinstance(residual, HyperConnections):
            s = residual.streams
            each += (s + 1) * d + _WIDE * (residual.num_weights + 1 + s + s * s)
        return 2.0 * each * t

    def _input(self, index: int, prefix: str, size: float, leaves: Sequence[str]) -> Iterator[float]:
        """An input, if one of the matrices that read it is adapted, and the products with A."""
        ranks = self.ranks.get(index, {})
        found = [ranks[f"{prefix}.{leaf}"] for leaf in leaves if f"{prefix}.{leaf}" in ranks]
        if found:
            yield size
            yield self.run.width * sum(found)
        if self.run.dropout:
            # Which elements are kept, one byte each, for every adapter by itself.
            widths = self.inputs.get(index, {})
            yield float(sum(widths.get(f"{prefix}.{leaf}", 0) for leaf in leaves))

    def _mixer_kept(self, index: int, layer: LayerSpec) -> float:
        parts = self._kda(index, layer.mixer) if isinstance(layer.mixer, KDASpec) else self._mla(index, layer.mixer)
        return sum(parts) * self.run.tokens

    def _kda(self, index: int, m: KDASpec) -> Iterator[float]:
        at, x = "self_attn", self.run.width
        p, d = x * m.width, x * self.arch.hidden_size
        first = ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "f_a_proj", "g_proj", "g_a_proj")
        yield from self._input(index, at, d, first)
        yield from self._input(index, at, x * (m.decay_rank or 0), ("f_b_proj",))
        yield from self._input(index, at, x * (m.gate_rank or 0), ("g_b_proj",))
        # Inputs of three convolutions; query, key; output and gate of the norm.
        yield p * (3 + 2 + 2)
        # The decay's logits, the decay and the value are islands.
        yield _WIDE * m.width * 3.0
        yield _WIDE * 2.0 * m.num_heads
        rows = 1 / _SEGMENT + 1 / self.run.sequence
        yield _WIDE * m.width * m.head_dim * rows
        yield from self._input(index, at, p, ("o_proj",))

    def _mla(self, index: int, m: MLASpec) -> Iterator[float]:
        at, x, d = "self_attn", self.run.width, self.run.width * self.arch.hidden_size
        yield from self._input(index, at, d, ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj"))
        q_in = x * (m.q_lora_rank or 0)
        yield q_in + _WIDE
        yield from self._input(index, at, q_in, ("q_b_proj",))
        yield x * (m.kv_lora_rank + m.qk_rope_head_dim) + _WIDE
        wide = x * m.num_heads
        yield wide * m.qk_head_dim
        if index in self.run.gathers:
            yield x * m.kv_lora_rank
        else:
            yield from self._input(index, at, x * m.kv_lora_rank, ("kv_b_proj",))
            yield wide * (m.qk_nope_head_dim + m.v_head_dim)
        yield self._attention_result(m)
        if m.rope is not None:
            yield 2.0 * _WIDE * m.qk_rope_head_dim
        if m.indexer is not None:
            yield self.run.sequence / 16  # a bit per visible key
        values = wide * m.v_head_dim
        if m.gate is not None:
            yield values if m.gate == "channel" else wide
        # Without a gate the input of the output projection is the output that attention keeps.
        yield from self._input(index, at, values if m.gate is not None or x < _WIDE else 0.0, ("o_proj",))

    def _ffn_kept(self, index: int, layer: LayerSpec) -> float:
        ffn = layer.ffn
        parts = self._glu(index, "mlp", ffn.intermediate_size) if isinstance(ffn, DenseSpec) else self._moe(index, ffn)
        return sum(parts) * self.run.tokens

    def _glu(self, index: int, prefix: str, f: int, *, shared: bool = False) -> Iterator[float]:
        x = self.run.width
        entry = 0.0 if shared else x * self.arch.hidden_size
        yield from self._input(index, prefix, entry, ("gate_proj", "up_proj"))
        yield x * 2.0 * f
        yield from self._input(index, prefix, x * f, ("down_proj",))

    def _moe(self, index: int, m: MoESpec) -> Iterator[float]:
        x, d = self.run.width, self.run.width * self.arch.hidden_size
        ranks = self.ranks.get(index, {})
        into = [f"mlp.shared_experts.{leaf}" for leaf in ("gate_proj", "up_proj")] + ["mlp.latent_down"]
        if m.latent is None or any(name in ranks for name in into):
            yield d  # the norm's output: the input of the experts, or of an adapter
        yield _WIDE * (m.num_experts + 1 + 2 * m.top_k) + _INDEX * m.top_k
        yield _WIDE * self.sums.get(index, 0)
        before_activation = _WIDE * 2.0 * m.intermediate_size * m.top_k
        if self.run.recompute != "selective" and before_activation * self.run.tokens <= EXPERT_KEPT:
            yield before_activation
        if m.latent is not None:
            yield x * 2.0 * m.latent.size + _WIDE
            yield x * ranks.get("mlp.latent_down", 0)
            yield from self._input(index, "mlp", x * m.latent.size, ("latent_up",))
        if m.shared_intermediate_size:
            at = "mlp.shared_experts"
            yield from self._glu(index, at, m.shared_intermediate_size, shared=True)

    def _ffn_moment(self, index: int, layer: LayerSpec) -> Moment:
        return ffn_moment(layer.ffn, self.arch.hidden_size, self.run.tokens, self.run.width,
                          _WIDE * self.experts.get(index, 0))

    def _mixer_moment(self, index: int, layer: LayerSpec) -> Moment:
        return mixer_moment(layer.mixer, self.arch.hidden_size, self.run.tokens, self.run.sequence,
                            self.run.width, gathers=index in self.run.gathers)
