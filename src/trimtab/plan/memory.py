"""Peak memory of a rank: separate lines that sum to the total.

Knows: which tensors live at the same time, stage by stage. Does not know: time.

`allocated` is what the framework's allocator hands out at the peak, `reserved` what it holds from
the driver; beside both stand driver context and communication buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from trimtab.arch.outline import GatedDeltaSpec, GQASpec, Outline, OutlineLayer
from trimtab.arch.spec import AttnRes, DenseSpec, HyperConnections, KDASpec, MLASpec, MoESpec
from trimtab.config.cluster import Cluster
from trimtab.plan.job import Dispatcher, Job
from trimtab.plan.kept import Kept, Shape, kept_bytes, kept_tensors, routed_width
from trimtab.plan.placement import Degrees
from trimtab.plan.stages import Kinds, Stage, telling
from trimtab.plan.states import States

_X = 2
_MIB = 2**20
# Rounding of blocks and holes between them, over allocated bytes: the median of published pairs of
# reserved and allocated peaks, and their tenth and ninetieth percentile.
FRAGMENTATION = 1.04
FRAGMENTATION_BAND = (1.02, 1.10)
# Chunks of an interleaved pipeline free blocks of several sizes in turns: the largest published
# ratio, with which runs that ended out of memory 20 GiB below the device's size are explained.
FRAGMENTATION_INTERLEAVED = 1.21
# Buffers of one process group; published readings are 342 to 392 MB.
_GROUP_BYTES = 360 * 10**6
# The text loss is computed in chunks of so many tokens.
_LOSS_CHUNK = 1024
_INDEX_CHUNK = 1024

ALLOCATED = (
    "base_weights", "adapters", "gradients", "moments", "masters", "gathered_parameters",
    "kept_activations", "recomputed_layer", "working_set", "routing_buffers", "dispatch_buffers",
    "linear_attention_states", "residual_bank", "logits", "dequantisation", "indexer",
    "gradient_buffer", "workspace",
)
OUTSIDE = ("allocator_overhead", "communication", "context")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run a job.

    Args:
        degrees: of parallelism.
        stages: of the pipeline.
        dispatcher: how tokens reach their experts.
        resident: the base is whole on every data-parallel rank.
    """

    degrees: Degrees
    stages: tuple[Stage, ...]
    dispatcher: Dispatcher = "dedup"
    resident: bool = False


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak memory of a rank of one stage.

    Args:
        stage: which.
        lines: bytes by name, in the order of `ALLOCATED` and `OUTSIDE`.
        host: bytes of this rank in host memory.
    """

    stage: int
    lines: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak."""
        return sum(self.lines[name] for name in ALLOCATED)

    @property
    def reserved(self) -> float:
        """Bytes that the allocator holds."""
        return self.allocated + self.lines["allocator_overhead"]

    @property
    def total(self) -> float:
        """Everything, as the driver shows it."""
        return sum(self.lines.values())


class MemoryModel:
    """Memory of a model and a job in any layout.

    Args:
        outline: the model.
        job: what is run.
        cluster: whose driver takes its share.
    """

    def __init__(self, outline: Outline, job: Job, cluster: Cluster) -> None:
        self.outline, self.job, self.cluster = outline, job, cluster
        self.states = States(outline, job)
        self.kinds = Kinds(outline)
        self._layer_kept = lru_cache(maxsize=None)(self._kept)
        self._largest = lru_cache(maxsize=None)(self._working)

    def of_layout(self, layout: Layout) -> tuple[StageMemory, ...]:
        """Memory of a rank of every stage."""
        return tuple(self.of_stage(layout, stage) for stage in layout.stages)

    def worst(self, layout: Layout) -> StageMemory:
        """The stage that needs most."""
        stages = telling(self.kinds, layout.stages)
        return max((self.of_stage(layout, s) for s in stages), key=lambda memory: memory.total)

    def tokens(self, degrees: Degrees) -> float:
        """Tokens of a micro-batch on one rank, before tensor parallelism."""
        return self.job.micro_batch * self.job.seq_len / degrees.cp

    def rows(self, layer: OutlineLayer, degrees: Degrees) -> float:
        """Routed rows that the experts of the fullest rank receive."""
        if not isinstance(layer.ffn, MoESpec):
            return 0.0
        load = self.job.routing
        if self.job.capacity_factor is not None:
            load = min(load, self.job.capacity_factor)
        part = self.tokens(degrees) * degrees.etp / degrees.tp
        return part * layer.ffn.top_k * (load if degrees.ep > 1 else 1.0)

    def in_flight(self, layout: Layout, stage: Stage) -> float:
        """Micro-batches whose activations a stage holds at its peak, in whole models' worth."""
        pp, chunks = layout.degrees.pp, self.job.chunks
        batches = micro_batches(self.job, layout.degrees)
        if self.job.method == "frozen":
            return 1.0
        if chunks > 1 and pp > 1:
            # Interleaved 1F1B: warm-up of (pp - i - 1) * 2 + (chunks - 1) * group, and one more.
            warm = (pp - stage.index - 1) * 2 + (chunks - 1) * (self.job.chunk_group or pp) + 1
            return min(batches * chunks, warm) / chunks
        return min(batches, pp - stage.index)

    def of_stage(self, layout: Layout, stage: Stage) -> StageMemory:
        """Memory of a rank of one stage."""
        job, degrees = self.job, layout.degrees
        tokens, flight = self.tokens(degrees), self.in_flight(layout, stage)
        state = self.states.bytes_on_rank(stage, degrees, resident=layout.resident)
        lines = dict.fromkeys((*ALLOCATED, *OUTSIDE), 0.0)
        lines["base_weights"], lines["adapters"] = state.base, state.adapters
        lines["gradients"], lines["moments"] = state.gradients, state.moments
        lines["masters"], lines["gathered_parameters"] = state.masters, state.gathered
        kept, again = self._activations(layout, stage, flight)
        lines["kept_activations"] = kept
        moment = self._moment(stage, layout)
        moment["recomputed_layer"] = again
        if stage.has_head:
            # Loss and layers are at work one after the other; the peak is at the larger of the two.
            head = {"logits": self._head(degrees, tokens)}
            moment = head if sum(head.values()) > sum(moment.values()) else moment
        lines.update(moment)
        if stage.has_head and self.states.is_whole(degrees):
            outputs = tokens * micro_batches(job, degrees)
            lines["logits"] += _X * outputs * self.outline.vocab_size / degrees.tp
        lines["residual_bank"] = self._bank(stage, degrees, flight)
        lines["workspace"] = float(job.stack.workspace)
        if job.stack.weight_grad_buffer and job.method == "full":
            lines["gradient_buffer"] = self._gradient_buffer(stage, degrees)
        memory = StageMemory(stage.index, lines, state.host)
        interleaved = job.chunks > 1 and degrees.pp > 1 and not job.stack.expandable_segments
        share = FRAGMENTATION_INTERLEAVED if interleaved else FRAGMENTATION
        lines["allocator_overhead"] = memory.allocated * (share - 1)
        groups = sum(n > 1 for n in (degrees.tp, degrees.pp, degrees.ep, degrees.cp, degrees.data))
        lines["communication"] = groups * float(_GROUP_BYTES)
        lines["context"] = self.cluster.context.value
        return memory

    def _moment(self, stage: Stage, layout: Layout) -> dict[str, float]:
        """What the layer that needs most needs while it is at work."""
        degrees = _inner(layout.degrees)
        most: dict[str, float] = {}
        for kind, _ in self.kinds.count(stage.first, stage.last):
            found = self._largest(kind, degrees, layout.dispatcher)
            if sum(found.values()) > sum(most.values()):
                most = found
        return dict(most)

    def tensors(self, kind: int, degrees: Degrees) -> tuple[Kept, ...]:
        """What a layer of a kind keeps, selective recomputation not yet applied."""
        layer = self.kinds.layers[kind]
        shape = Shape(
            self.outline.hidden_size, degrees.tp, degrees.cp, degrees.etp, gated=layer.gated
        )
        return kept_tensors(layer, shape, self.job, self.outline.residual)

    def _kept(self, kind: int, degrees: Degrees, drop: frozenset[str]) -> float:
        rows = self.rows(self.kinds.layers[kind], degrees)
        return kept_bytes(self.tensors(kind, degrees), self.tokens(degrees), rows, drop)

    def layer_kept(self, kind: int, degrees: Degrees, drop: frozenset[str] = frozenset()) -> float:
        """Bytes that one layer keeps of one micro-batch without recomputing it whole."""
        return self._layer_kept(kind, _inner(degrees), drop)

    def _activations(self, layout: Layout, stage: Stage, flight: float) -> tuple[float, float]:
        """Kept bytes of all micro-batches in flight, and the layer computed again at the peak."""
        job, degrees, kinds = self.job, layout.degrees, self.kinds
        if job.method == "frozen":
            every = kinds.count(stage.first, stage.last)
            return 0.0, max(self.layer_kept(kind, degrees) for kind, _ in every)
        policy = job.recompute
        whole = whole_layers(job, stage.num_layers)
        border = _X * self.outline.hidden_size * self.tokens(degrees) / degrees.tp
        if isinstance(self.outline.residual, HyperConnections):
            border *= self.outline.residual.streams
        total = border * whole
        for kind, count in kinds.count(stage.first + whole, stage.last):
            total += count * self.layer_kept(kind, degrees, policy.selective)
        if stage.has_head and job.mtp:
            total += sum(self.layer_kept(kind, degrees, policy.selective) for kind in kinds.mtp)
        again = kinds.count(stage.first, stage.first + whole)
        return total * flight, max((self.layer_kept(kind, degrees) for kind, _ in again), default=0.0)

    def _bank(self, stage: Stage, degrees: Degrees, flight: float) -> float:
        residual = self.outline.residual
        if not isinstance(residual, AttnRes):
            return 0.0
        row = _X * self.outline.hidden_size * self.tokens(degrees) / degrees.tp
        rows = -(-stage.last // residual.block_size)
        # The rows, and their gradients while the backward pass is in the stage.
        return row * rows * (flight + (self.job.method != "frozen"))

    def _working(self, kind: int, degrees: Degrees, dispatcher: Dispatcher) -> dict[str, float]:
        """What a layer needs while it is at work, by line."""
        layer = self.kinds.layers[kind]
        tokens, rows = self.tokens(degrees), self.rows(layer, degrees)
        d, found = self.outline.hidden_size, {}
        stream = _X * d * tokens / degrees.tp
        found["working_set"] = 2 * stream + self._ffn_gradients(layer, degrees, tokens, rows)
        if isinstance(layer.ffn, MoESpec):
            width = routed_width(layer, d)
            found["routing_buffers"] = rows * (2 * 8 + 4)
            copies = 2.0 if dispatcher != "all_gather" else 2.0 + degrees.ep / max(1, layer.ffn.top_k)
            found["dispatch_buffers"] = copies * rows * width * _X if degrees.ep > 1 else 0.0
            found["dequantisation"] = self._decoded(layer.ffn, width, degrees)
        if isinstance(layer.mixer, KDASpec | GatedDeltaSpec):
            found["linear_attention_states"] = self._recurrent(layer.mixer, degrees, tokens)
        if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer is not None:
            # Scores of a block of queries in fp32, over all keys.
            keys = self.job.seq_len
            block = min(tokens, _INDEX_CHUNK)
            found["indexer"] = 4.0 * block * keys * 2
        return found

    def _ffn_gradients(
        self, layer: OutlineLayer, degrees: Degrees, tokens: float, rows: float
    ) -> float:
        """Gradients of a gated block at their peak: of its product and of both its factors."""
        if self.job.method == "frozen":
            return 0.0
        ffn = layer.ffn
        if isinstance(ffn, DenseSpec):
            return 2 * _X * ffn.intermediate_size * tokens / degrees.tp
        return (3 * ffn.intermediate_size / degrees.etp + self.outline.hidden_size) * _X * rows

    def _decoded(self, ffn: MoESpec, width: int, degrees: Degrees) -> float:
        """Experts of a frozen 4-bit base decoded at once: one, by block, on each of two streams."""
        if ffn.form != "mxfp4" or self.job.method == "full" or self.job.base_dtype != "native":
            return 0.0
        return 2.0 * 3 * ffn.intermediate_size * width * _X

    def _recurrent(
        self, mixer: KDASpec | GatedDeltaSpec, degrees: Degrees, tokens: float
    ) -> float:
        """Chunk states forward and backward, and fp32 gradients of the mixer's inputs."""
        if isinstance(mixer, KDASpec):
            heads, key, value = mixer.num_heads / degrees.tp, mixer.head_dim, mixer.head_dim
            gradients = 4 * 4 * mixer.width / degrees.tp
        else:
            heads, key, value = mixer.value_heads / degrees.tp, mixer.key_dim, mixer.value_dim
            gradients = 3 * 4 * heads * value
        states = tokens / 64 * heads * key * value * 4
        return 2 * states + tokens * gradients

    def _head(self, degrees: Degrees, tokens: float) -> float:
        """Logits, their copies and gradient, and what the head adds to its own gradient."""
        job, d = self.job, self.outline.hidden_size
        vocab = self.outline.vocab_size / degrees.tp
        norm = 2 * _X * d * tokens / degrees.tp
        if job.method == "frozen":
            return 4 * vocab * min(tokens, _LOSS_CHUNK) + norm
        if job.stack.logit_bytes == 0:
            return (4 + 4 + 2) * vocab * min(tokens, _LOSS_CHUNK) + norm
        # The norm's input and output and the stream's gradient, and under sequence parallelism the
        # gathered input of the head and its gradient.
        streams = _X * d * tokens * (3 / degrees.tp + 2 * (degrees.tp > 1))
        loss, backward = job.stack.logit_bytes * vocab * tokens, 0.0
        if job.stack.weight_grad_buffer and job.method == "full":
            # The gradient of the logits beside that of the head itself.
            backward = _X * vocab * tokens + _X * vocab * d
            loss = 0.0 if job.stack.loss_in_place else loss
        return max(loss, backward) + streams

    def _gradient_buffer(self, stage: Stage, degrees: Degrees) -> float:
        """One tensor per shape of a trained matrix of these layers."""
        shapes: dict[tuple[float, float], float] = {}
        d, tp = self.outline.hidden_size, degrees.tp
        for kind, _ in self.kinds.count(stage.first, stage.last):
            layer = self.kinds.layers[kind]
            if isinstance(layer.mixer, GQASpec):
                q = layer.mixer.num_heads * layer.mixer.head_dim
                kv = layer.mixer.num_kv_heads * layer.mixer.head_dim
                shapes[(q + 2 * kv, d)] = (q + 2 * kv) * d / tp
                shapes[(d, q)] = d * q / tp
            elif isinstance(layer.mixer, MLASpec):
                m = layer.mixer
                for rows, columns in (
                    (m.num_heads * m.qk_head_dim, m.q_lora_rank or d),
                    (m.num_heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank),
                    (d, m.num_heads * m.v_head_dim),
                ):
                    shapes[(rows, columns)] = rows * columns / tp
            ffn = layer.ffn
            f = ffn.intermediate_size if isinstance(ffn, DenseSpec) else ffn.shared_intermediate_size
            if f:
                shapes[(2 * f, d)] = 2 * f * d / tp
                shapes[(d, f)] = d * f / tp
            if isinstance(ffn, MoESpec):
                width = routed_width(layer, d)
                shapes[(2 * ffn.intermediate_size, width)] = 2 * ffn.intermediate_size * width
                shapes[(width, ffn.intermediate_size)] = width * ffn.intermediate_size
        return _X * sum(shapes.values())


def _inner(degrees: Degrees) -> Degrees:
    """The degrees that one layer's activations depend on."""
    return Degrees(cp=degrees.cp, tp=degrees.tp, ep=degrees.ep, etp=degrees.etp)


def whole_layers(job: Job, layers: int) -> int:
    """Layers of a stage that are computed again in the backward pass, the first ones."""
    policy = job.recompute.layers
    if policy == "all":
        return layers
    return 0 if policy == "none" else min(policy, layers)


def micro_batches(job: Job, degrees: Degrees) -> int:
    """Micro-batches of one pipeline in one optimizer step, at least one."""
    return max(1, round(job.global_batch / degrees.data / job.micro_batch))
