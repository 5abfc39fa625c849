"""Serving: weights, caches, adapters on one set of ranks, and how fast it reads and writes.

Knows: what a request keeps, the roofline of one decoding step. Does not know: engines.

A replica divides attention over tp ranks and experts over all its tp * dp ranks; each dp group has
its own requests. Latent caches are whole on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimtab.arch.outline import Outline
from trimtab.arch.outline_cache import active_parameters, request_bytes
from trimtab.arch.spec import MoESpec
from trimtab.config.cluster import Cluster
from trimtab.plan.job import Job
from trimtab.plan.kept import routed_width
from trimtab.plan.memory import FRAGMENTATION, Layout
from trimtab.plan.network import exchange, ring_seconds
from trimtab.plan.placement import Degrees, expert_span, span_of
from trimtab.plan.search import capacity, common_heads
from trimtab.plan.stages import Stage
from trimtab.plan.states import States
from trimtab.plan.timing import TimeModel

_X = 2
_GROUP_BYTES = 360 * 10**6
# Tokens of one prefill chunk; its activations are what serving needs beside weights and caches.
_CHUNK = 8192
# Sequences whose logits exist at once.
_SAMPLED = 256
_KERNELS_PER_LAYER = 20
_MAX_TP = 16


@dataclass(frozen=True, slots=True)
class ServingLayout:
    """One way to serve.

    Args:
        tp, dp, replicas: degrees; experts stand on all tp * dp ranks of a replica.
        memory: bytes per rank by line, with as many requests as fit.
        adapter_bytes: of one adapter on a rank.
        requests: at once, of the whole machine, at full length.
        decode_parts: seconds of one step with all of them, by what they go into.
        tokens_per_second: written by the whole machine.
        prefill_tokens_per_second: read by the whole machine.
    """

    tp: int
    dp: int
    replicas: int
    memory: dict[str, float]
    adapter_bytes: float
    requests: int
    decode_parts: dict[str, float]
    tokens_per_second: float
    prefill_tokens_per_second: float

    @property
    def decode_seconds(self) -> float:
        """Of one step: the time between two tokens of a request."""
        return sum(self.decode_parts.values())

    @property
    def most_adapters(self) -> int:
        """Adapters that a rank could hold if it gave up all requests but one of each group."""
        groups = self.dp * self.replicas
        spare = self.memory["caches"] * (1 - groups / self.requests) + self.memory["adapters"]
        return int(spare // self.adapter_bytes) if self.adapter_bytes else 0


class ServingModel:
    """Memory and speed of a model on a cluster, in any layout.

    Args:
        outline: the model.
        job: whose base dtype and adapters are served.
        cluster: the machine.
        adapters: resident at once.
        tokens: of the longest request.
    """

    def __init__(
        self, outline: Outline, job: Job, cluster: Cluster, adapters: int, tokens: int
    ) -> None:
        self.outline, self.cluster, self.adapters, self.tokens = outline, cluster, adapters, tokens
        self._job = job
        self._block = States(outline, job).of_stage(Stage(0, 0, outline.num_layers, True, True), 1)
        self._moe = next((x for x in outline.layers if isinstance(x.ffn, MoESpec)), None)
        self._active = active_parameters(outline)

    def layouts(self, ranks: int) -> list[ServingLayout]:
        """Layouts that hold at least one request per dp group, the fastest writer first."""
        return sorted(self._layouts(ranks), key=lambda layout: -layout.tokens_per_second)

    def _layouts(self, ranks: int) -> Iterator[ServingLayout]:
        for replicas, tp, dp in self._degrees_of(ranks):
            if layout := self._layout(replicas, tp, dp):
                yield layout

    def _degrees_of(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Legal (replicas, tp, dp)."""
        experts = self._moe.ffn.num_experts if self._moe and isinstance(self._moe.ffn, MoESpec) else 0
        heads = common_heads(self.outline)
        for size in (n for n in range(1, ranks + 1) if ranks % n == 0):
            if experts and experts % size:
                continue
            for tp in (n for n in range(1, min(size, _MAX_TP) + 1) if size % n == 0):
                if heads % tp == 0:
                    yield ranks // size, tp, size // tp

    def degrees(self, tp: int, dp: int) -> Degrees:
        """Of one replica."""
        return Degrees(dp_shard=dp, tp=tp, ep=tp * dp if self._moe is not None else 1)

    def _layout(self, replicas: int, tp: int, dp: int) -> ServingLayout | None:
        memory, adapter = self._memory(tp, dp)
        free = capacity(self.cluster) - sum(memory.values())
        request = request_bytes(self.outline, tp).at(self.tokens)
        per_group = int(free // request) if free > 0 else 0
        if per_group < 1:
            return None
        memory["caches"] = per_group * request
        parts = self.decode_parts(tp, dp, per_group)
        requests = per_group * dp * replicas
        return ServingLayout(
            tp, dp, replicas, memory, adapter, requests, parts, requests / sum(parts.values()),
            replicas * self._prefill(tp, dp),
        )

    def least_memory(self, ranks: int) -> float:
        """Bytes of a rank with one request, in the layout that needs the fewest."""
        return min(
            sum(self._memory(tp, dp)[0].values()) + request_bytes(self.outline, tp).at(self.tokens)
            for _, tp, dp in self._degrees_of(ranks)
        )

    def _memory(self, tp: int, dp: int) -> tuple[dict[str, float], float]:
        """Bytes of a rank without requests, and of one adapter."""
        block, ep = self._block, self.degrees(tp, dp).ep
        trained = block.tp_elements / tp + block.whole_elements + block.expert_elements / ep
        memory = {
            "weights": block.tp / tp + block.whole + block.expert / ep,
            "adapters": self.adapters * _X * trained,
            "workspace": _CHUNK / dp * _X * self.outline.hidden_size * 12,
            "logits": 4.0 * _SAMPLED * self.outline.vocab_size / tp,
            "communication": float(_GROUP_BYTES) * ((tp > 1) + (dp > 1)),
            "context": self.cluster.context.value,
        }
        overhead = (memory["workspace"] + memory["logits"]) * (FRAGMENTATION - 1)
        return memory | {"allocator_overhead": overhead}, _X * trained

    def _prefill(self, tp: int, dp: int) -> float:
        """Tokens per second that one replica reads: forward passes of the time model."""
        job = replace(self._job, method="frozen", seq_len=self.tokens, global_batch=dp)
        stage = Stage(0, 0, self.outline.num_layers, True, True)
        layout = Layout(self.degrees(tp, dp), (stage,), "dedup", resident=True)
        step = TimeModel(self.outline, job, self.cluster).step(layout)
        return dp * self.tokens / step.seconds

    def decode_parts(self, tp: int, dp: int, requests: int) -> dict[str, float]:
        """Seconds of one step of every request; weights, caches and adapters are read once.

        Args:
            tp: ranks that share a matrix.
            dp: groups of a replica with requests of their own.
            requests: of each group, at full length.
        """
        c, degrees, outline = self.cluster, self.degrees(tp, dp), self.outline
        memory, _ = self._memory(tp, dp)
        rate = c.memory_bandwidth.value * c.memory_efficiency.value
        weights = memory["weights"]
        moe = self._moe.ffn if self._moe is not None else None
        if isinstance(moe, MoESpec):
            # Experts that no token of the step chose are not read.
            chosen = 1 - (1 - moe.top_k / moe.num_experts) ** (requests * dp)
            weights -= self._block.expert / degrees.ep * (1 - chosen)
        adapters = memory["adapters"] * min(1.0, requests * dp / max(1, self.adapters))
        flops = 2 * self._active * requests / tp / (c.bf16_flops.value * c.gemm_efficiency.value)
        parts = {
            "weights": max(weights / rate, flops), "adapters": adapters / rate,
            "caches": requests * request_bytes(outline, tp).at(self.tokens) / rate,
        }
        if tp > 1:
            row = float(_X * outline.hidden_size * requests)
            once = ring_seconds(c, span_of(c, tp, 1), row, "all_reduce")
            parts["tensor-parallel collectives"] = 2 * outline.num_layers * once
        if self._moe is not None and isinstance(moe, MoESpec) and degrees.ep > 1:
            layers = sum(isinstance(layer.ffn, MoESpec) for layer in outline.layers)
            width = _X * routed_width(self._moe, outline.hidden_size)
            parts["all-to-all of tokens"] = 2 * layers * exchange(
                c, expert_span(c, degrees), "dedup", requests / tp, moe.num_experts, moe.top_k,
                width, self._job.routing,
            ).seconds
        launched = _KERNELS_PER_LAYER * outline.num_layers * c.kernel_seconds.value
        parts["launches of kernels"] = max(0.0, launched - sum(parts.values()))
        return parts
