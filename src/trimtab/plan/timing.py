"""Seconds of one optimizer step: compute, exposed communication, pipeline, gradients.

Knows: the roofline of each operator, what hides behind what. Does not know: memory.

An operator takes the longer of its FLOPs over the peak and its bytes over the memory bandwidth,
each at the efficiency of its kind, plus the fixed cost of its kernels. A layer takes at least what
the host needs to launch it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from trimtab.arch.outline import GQASpec, Outline, OutlineLayer
from trimtab.arch.spec import AttnRes, KDASpec, MLASpec, MoESpec
from trimtab.config.cluster import Cluster
from trimtab.plan.job import Dispatcher, Job
from trimtab.plan.kept import routed_width
from trimtab.plan.memory import Layout, micro_batches, whole_layers
from trimtab.plan.network import exchange, ring_seconds, send_seconds
from trimtab.plan.pipeline import Slot, estimate, simulate
from trimtab.plan.placement import Degrees, Span, expert_span, span_of
from trimtab.plan.stages import Kinds, Stage
from trimtab.plan.states import States
from trimtab.plan.work import Op, Work

Parts = defaultdict[str, float]

_X = 2
# Shares of a matrix product's efficiency that are left in 8 and in 4 bit, with the quantisation.
_NARROW = {"fp8": 0.8, "fp4": 0.55}
# Linear attention runs at about half the efficiency of softmax attention.
_DELTA_SHARE = 0.5
# Host operators of one forward pass, read off published runs that wait for the host.
_HOST_OPS = {"mixer": 60, "dense": 15, "routed": 180, "unfused dispatch": 40, "tp": 20, "lora": 40}
# Rows per expert at which a grouped product reaches half of its best efficiency.
_HALF_ROWS = 96.0


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass of one stage over one micro-batch, by what they go into.

    Args:
        parts: seconds by name; their sum is the pass.
        hidden: seconds of communication that hide behind compute.
    """

    parts: Parts
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class StepTime:
    """One optimizer step.

    Args:
        seconds: of the step.
        parts: seconds by what they go into, on the slowest stage; they sum to `seconds`.
        forward: seconds of a micro-batch on each stage.
        backward: the same of the backward pass.
        exchange: seconds of dispatch and combination on the slowest stage, hidden or not.
        slots: of the simulated pipeline, empty where it was only estimated.
    """

    seconds: float
    parts: dict[str, float]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    exchange: float
    slots: tuple[Slot, ...] = ()

    @property
    def exposed_exchange_share(self) -> float:
        """Share of the step that waits for dispatch and combination."""
        return self.parts.get("expert_exchange", 0.0) / self.seconds


class TimeModel:
    """Step time of a model and a job on a cluster, in any layout.

    Args:
        outline: the model.
        job: what is run.
        cluster: the machine.
        exchange_overlap: dispatch and combination run beside compute.
    """

    def __init__(
        self, outline: Outline, job: Job, cluster: Cluster, *, exchange_overlap: bool = False
    ) -> None:
        self.outline, self.job, self.cluster = outline, job, cluster
        self.states = States(outline, job)
        self.kinds = Kinds(outline)
        self._work = Work(outline, job)
        self._overlap = exchange_overlap
        self._passes = lru_cache(maxsize=None)(self._layer_passes)

    def step(self, layout: Layout, *, trace: bool = False) -> StepTime:
        """Time of a step.

        Args:
            layout: how the job is divided.
            trace: simulate the pipeline pass by pass, for one chunk per rank.
        """
        degrees, batches = layout.degrees, micro_batches(self.job, layout.degrees)
        passes = self._all_passes(layout)
        forward = tuple(f.seconds for f, _ in passes)
        backward = tuple(b.seconds for _, b in passes)
        send = [self._send(degrees, stage) for stage in layout.stages[:-1]]
        slots: list[Slot] = []
        chunks = self.job.chunks if degrees.pp > 1 else 1
        if trace and chunks == 1:
            pipeline, slots = simulate(forward, backward, send, batches)
        else:
            pipeline = estimate(forward, backward, send, batches, chunks)
        slowest = max(range(len(passes)), key=lambda i: forward[i] + backward[i])
        parts: Parts = defaultdict(float)
        for one in passes[slowest]:
            for name, seconds in one.parts.items():
                parts[name] += seconds * batches
        parts["pipeline_bubble"] = max(0.0, pipeline - sum(parts.values()))
        last = backward[slowest]
        parts["gradient_exchange"] = self._gradients(layout, slowest, last)
        parts["optimizer"] = self._optimizer(layout, slowest)
        f, b = passes[slowest]
        shared = f.parts["expert_exchange"] + b.parts["expert_exchange"] + f.hidden + b.hidden
        return StepTime(
            sum(parts.values()), dict(parts), forward, backward, shared * batches, tuple(slots)
        )

    def _all_passes(self, layout: Layout) -> list[tuple[Pass, Pass]]:
        """Passes of every stage, computed once for equal ones."""
        known: dict[object, tuple[Pass, Pass]] = {}
        found = []
        for stage in layout.stages:
            key = (self.kinds.count(stage.first, stage.last), stage.has_embedding, stage.has_head)
            if key not in known:
                known[key] = self._stage_passes(layout, stage)
            found.append(known[key])
        return found

    def op_seconds(self, op: Op, *, flops: float | None = None, passes: float = 1.0) -> float:
        """Seconds of one operator.

        Args:
            op: the operator.
            flops: in place of its own.
            passes: over its bytes.
        """
        c = self.cluster
        work = op.flops if flops is None else flops
        peak, moved = c.bf16_flops.value, op.bytes * passes
        if op.kind in ("gemm", "grouped"):
            peak = self._product_peak()
        if op.kind == "gemm":
            share = c.measured_share("gemm", op.rows) or c.gemm_efficiency.value
        elif op.kind == "grouped":
            formula = c.grouped_efficiency.value * op.rows / (op.rows + _HALF_ROWS) if op.rows else 1.0
            share = c.measured_share("grouped", op.rows) or formula
        elif op.kind == "attention":
            share = c.attention_efficiency.value
        else:
            share = c.attention_efficiency.value * _DELTA_SHARE
        reading = moved / (c.memory_bandwidth.value * c.memory_efficiency.value)
        decoding = 2 * op.decoded * passes / (c.memory_bandwidth.value * c.memory_efficiency.value)
        computing = work / (peak * share) if work else 0.0
        return max(computing, reading) + decoding + op.kernels * c.kernel_seconds.value * 0.2

    def _product_peak(self) -> float:
        c, precision = self.cluster, self.job.precision
        if precision == "fp4" and c.fp4_flops.value:
            return c.fp4_flops.value * _NARROW["fp4"]
        if precision != "bf16" and c.fp8_flops.value:
            return c.fp8_flops.value * _NARROW["fp8"]
        return c.bf16_flops.value

    def _layer_passes(
        self, kind: int, degrees: Degrees, dispatcher: Dispatcher, is_whole: bool
    ) -> tuple[Pass, Pass]:
        """Forward and backward of one layer.

        Args:
            kind: of the layer.
            degrees: of parallelism.
            dispatcher: of its experts.
            is_whole: the whole layer is computed again in the backward pass.
        """
        layer = self.kinds.layers[kind]
        ops = self._work.layer(layer, degrees)
        forward: Parts = defaultdict(float)
        backward: Parts = defaultdict(float)
        for op in ops:
            once = self.op_seconds(op)
            extra = self._adapter_seconds(op)
            forward[op.kind] += once
            forward["adapters"] += extra
            if is_whole or (op.again and op.again in self.job.recompute.selective):
                backward["recomputation"] += once + extra
            grad = self.op_seconds(op, flops=op.flops * op.backward, passes=op.backward or 1.0)
            if op.backward:
                backward[op.kind] += grad
            if op.trained:
                backward[op.kind] += once
            backward["adapters"] += 2 * extra
        self._communicate(layer, degrees, dispatcher, is_whole, forward, backward)
        host = self._host(layer, degrees, dispatcher)
        if not self.job.graphs:
            forward["host"] = max(0.0, host - sum(forward.values()))
            backward["host"] = max(0.0, host * (1 + is_whole) - sum(backward.values()))
        hidden_f = self._hide(forward)
        hidden_b = self._hide(backward)
        return Pass(forward, hidden_f), Pass(backward, hidden_b)

    def _adapter_seconds(self, op: Op) -> float:
        if not op.adapter_flops:
            return 0.0
        c = self.cluster
        # Two thin products; their width keeps them far from the peak.
        return op.adapter_flops / (0.3 * c.bf16_flops.value) + 2 * c.kernel_seconds.value

    def _host(self, layer: OutlineLayer, degrees: Degrees, dispatcher: Dispatcher) -> float:
        """Seconds that the host needs for one pass of a layer."""
        ops = _HOST_OPS["mixer"] + _HOST_OPS["tp"] * (degrees.tp > 1)
        if isinstance(layer.ffn, MoESpec):
            ops += _HOST_OPS["routed"] + _HOST_OPS["unfused dispatch"] * (dispatcher != "dedup")
        else:
            ops += _HOST_OPS["dense"]
        ops += _HOST_OPS["lora"] * self.job.trains_adapters
        return ops * self.cluster.host_seconds.value

    def _hide(self, parts: Parts) -> float:
        """Move expert exchange behind compute where the program does that; returns the seconds."""
        if not self._overlap:
            return 0.0
        compute = sum(parts[k] for k in ("gemm", "grouped", "attention", "linear_attention", "vector"))
        hidden = min(parts["expert_exchange"], compute) * self.cluster.compute_overlap.value
        parts["expert_exchange"] -= hidden
        return hidden

    def _communicate(
        self, layer: OutlineLayer, degrees: Degrees, dispatcher: Dispatcher, is_whole: bool,
        forward: Parts, backward: Parts,
    ) -> None:
        c, tokens, d = self.cluster, self._work.tokens(degrees), self.outline.hidden_size
        again = 1 + is_whole
        if degrees.tp > 1:
            span = span_of(c, degrees.tp, 1)
            pairs = 1 + (not isinstance(layer.ffn, MoESpec) or bool(layer.ffn.shared_intermediate_size))
            once = 2 * pairs * ring_seconds(c, span, _X * d * tokens, "all_gather")
            forward["tensor_exchange"] += once
            # Inputs are gathered again for the gradients of weights.
            regather = 0.5 * (self.job.method == "full")
            backward["tensor_exchange"] += once * (again + regather)
        if degrees.cp > 1:
            span = span_of(c, degrees.cp, degrees.tp)
            size = _X * tokens * _exchanged_width(layer) / degrees.tp
            once = size * (1 - 1 / degrees.cp) / _bandwidth(span) + 2 * c.collective_seconds.value
            forward["context_exchange"] += once
            backward["context_exchange"] += once * again
        if isinstance(layer.ffn, MoESpec) and degrees.ep > 1:
            width = routed_width(layer, d)
            dispatch = _X * 0.5 if self.job.precision != "bf16" else _X
            pair = sum(
                exchange(c, expert_span(c, degrees), dispatcher, tokens / degrees.tp,
                         layer.ffn.num_experts, layer.ffn.top_k, width * size, self.job.routing).seconds
                for size in (dispatch, _X)
            )
            forward["expert_exchange"] += pair
            backward["expert_exchange"] += pair * again

    def _stage_passes(self, layout: Layout, stage: Stage) -> tuple[Pass, Pass]:
        degrees, kinds = layout.degrees, self.kinds
        inner = Degrees(cp=degrees.cp, tp=degrees.tp, ep=degrees.ep, etp=degrees.etp)
        border = stage.first + whole_layers(self.job, stage.num_layers)
        groups = [(kind, count, True) for kind, count in kinds.count(stage.first, border)]
        groups += [(kind, count, False) for kind, count in kinds.count(border, stage.last)]
        heads = 0
        if stage.has_head:
            heads = 1 + (len(kinds.mtp) if self.job.mtp else 0)
            groups += [(kind, 1, False) for kind in kinds.mtp if self.job.mtp]
        forward: Parts = defaultdict(float)
        backward: Parts = defaultdict(float)
        hidden = [0.0, 0.0]
        for kind, count, is_whole in groups:
            both = self._passes(kind, inner, layout.dispatcher, is_whole)
            for i, (one, parts) in enumerate(zip(both, (forward, backward), strict=True)):
                hidden[i] += one.hidden * count
                for name, seconds in one.parts.items():
                    parts[name] += seconds * count
        for op in self._work.head(degrees) if heads else ():
            forward["head"] += heads * self.op_seconds(op)
            backward["head"] += heads * self.op_seconds(op) * (1 + op.trained)
        self._gather(layout, stage, forward, backward)
        if self.job.method == "frozen":
            backward = defaultdict(float)
        return Pass(forward, hidden[0]), Pass(backward, hidden[1])

    def _gather(self, layout: Layout, stage: Stage, forward: Parts, backward: Parts) -> None:
        """Parameters that are divided over data-parallel ranks are gathered, beside compute."""
        degrees = layout.degrees
        if self.job.stack.shards != "all" or layout.resident:
            return
        block = self.states.of_stage(stage, degrees.pp)
        c, seconds = self.cluster, 0.0
        dense = degrees.dp_shard * degrees.cp
        if dense > 1:
            size = block.tp / degrees.tp + block.whole
            seconds += ring_seconds(c, span_of(c, dense, degrees.tp), size, "all_gather")
        if degrees.expert_shard > 1 and block.expert:
            span = span_of(c, degrees.expert_shard, degrees.ep)
            seconds += ring_seconds(c, span, block.expert / (degrees.ep * degrees.etp), "all_gather")
        seconds *= self.states.gathered_share
        if self.states.is_whole(degrees):
            seconds /= micro_batches(self.job, degrees)
        for parts in (forward, backward):
            compute = sum(parts.values()) * c.compute_overlap.value
            parts["parameter_gather"] += max(0.0, seconds - compute)

    def _send(self, degrees: Degrees, stage: Stage) -> float:
        if degrees.pp == 1:
            return 0.0
        rows = 1.0
        if isinstance(self.outline.residual, AttnRes):
            rows += -(-stage.last // self.outline.residual.block_size)
        size = rows * _X * self.outline.hidden_size * self._work.tokens(degrees) / degrees.tp
        return send_seconds(self.cluster, size, degrees.stage)

    def _gradients(self, layout: Layout, index: int, last_backward: float) -> float:
        """Reduction of gradients after the last micro-batch, behind its backward pass in part."""
        degrees, job, c = layout.degrees, self.job, self.cluster
        block = self.states.of_stage(layout.stages[index], degrees.pp)
        ranks = degrees.data * degrees.cp
        if job.method == "frozen" or degrees.stage == 1:
            return 0.0
        elements = block.tp_elements / degrees.tp + block.whole_elements
        seconds = 0.0
        # Gradients are reduced and parameters gathered, or both in one all-reduce; divided parameters
        # are gathered with every pass.
        gathers = job.method == "full" and job.stack.shards != "all"
        bytes_per = job.stack.grad_bytes + (job.stack.weight_bytes if gathers else 0)
        if ranks > 1:
            span = span_of(c, ranks, degrees.tp)
            seconds += ring_seconds(c, span, elements * bytes_per, "all_gather")
        experts = degrees.expert_shard * degrees.dp_replicate
        if experts > 1 and block.expert_elements:
            span = span_of(c, experts, degrees.ep)
            size = block.expert_elements / (degrees.ep * degrees.etp) * bytes_per
            seconds += ring_seconds(c, span, size, "all_gather")
        if job.stack.overlaps_data:
            seconds = max(seconds * 0.1, seconds - c.compute_overlap.value * last_backward)
        return seconds

    def _optimizer(self, layout: Layout, index: int) -> float:
        degrees, c = layout.degrees, self.cluster
        state = self.states.bytes_on_rank(layout.stages[index], degrees, resident=layout.resident)
        moved = 2 * (state.moments + state.masters) + state.gradients + state.adapters
        seconds = moved / (c.memory_bandwidth.value * c.memory_efficiency.value)
        return seconds + 2 * state.host / c.host_link.value


def _exchanged_width(layer: OutlineLayer) -> float:
    """Channels per token of query, key, value and output."""
    m = layer.mixer
    if isinstance(m, GQASpec):
        return (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    if isinstance(m, MLASpec):
        return m.num_heads * (2 * m.qk_head_dim + 2 * m.v_head_dim)
    if isinstance(m, KDASpec):
        return 5 * m.width
    return 4.0 * m.value_heads * m.value_dim


def _bandwidth(span: Span) -> float:
    network = span.outer or span.inner
    if network is None:
        return float("inf")
    return network.bandwidth.value * network.reach("all_to_all", span.size)
