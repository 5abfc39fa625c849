"""Search over layouts: every division of the ranks that the model allows, the best first.

Knows: which degrees are legal, what a goal compares. Does not know: how a layout is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, get_args

from trimtab.arch.outline import GatedDeltaSpec, GQASpec, Outline
from trimtab.arch.spec import KDASpec, MLASpec, MoESpec
from trimtab.config.cluster import Cluster
from trimtab.plan.job import Dispatcher, Job, Recompute
from trimtab.plan.kept import routed_width
from trimtab.plan.memory import Layout, MemoryModel, StageMemory, micro_batches
from trimtab.plan.network import exchange
from trimtab.plan.placement import Degrees, expert_span
from trimtab.plan.stages import Stage, split
from trimtab.plan.timing import StepTime, TimeModel

Goal = Literal["fits", "fastest", "fewest_devices", "longest_context", "cheapest_token"]
GOALS: tuple[Goal, ...] = get_args(Goal)
DISPATCHERS: tuple[Dispatcher, ...] = ("dedup", "flat", "all_gather")

# Share of the device memory that a plan may fill.
MEMORY_SHARE = 0.95
_MIN_TOKENS_PER_RANK = 512
_MAX_TP = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user has fixed of a layout; None is free.

    Args:
        pp, tp, cp, ep, dp_shard: degrees.
        dispatcher: how tokens reach experts.
        recompute: `layer` or `none`.
        stages: layers per pipeline stage.
    """

    pp: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp_shard: int | None = None
    dispatcher: Dispatcher | None = None
    recompute: Literal["layer", "none"] | None = None
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its memory and time.

    Args:
        layout: the layout.
        job: the job with the recomputation that was chosen.
        memory: of the fullest stage.
        step: time of a step.
        tokens_per_second: of the whole job.
        exchanges: seconds of one dispatch and combination by dispatcher.
    """

    layout: Layout
    job: Job
    memory: StageMemory
    step: StepTime
    tokens_per_second: float
    exchanges: dict[str, float]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search saw.

    Args:
        candidates: layouts that fit, the best first.
        smallest: the layout that needs the least memory, whether it fits or not; None where no
            division of the ranks is legal.
        smallest_memory: of it.
        tried: layouts whose memory was computed.
    """

    candidates: tuple[Candidate, ...]
    smallest: Layout | None
    smallest_memory: StageMemory | None
    smallest_job: Job
    tried: int


def capacity(cluster: Cluster) -> float:
    """Bytes that a plan may fill on one rank."""
    return cluster.memory.value * MEMORY_SHARE


def search(
    outline: Outline, job: Job, cluster: Cluster, ranks: int, goal: Goal, limits: Limits,
    *, keep: int = 12,
) -> Found:
    """Find the layouts of a job on so many ranks.

    Args:
        outline: the model.
        job: what is run; its recomputation is tried both ways where `limits` leaves it free.
        cluster: the machine.
        ranks: of the job.
        goal: `fits` orders by memory, all others by time at this number of ranks.
        limits: what is fixed.
        keep: most candidates returned.
    """
    fitting: list[tuple[Layout, Job, StageMemory]] = []
    smallest: tuple[Layout, Job, StageMemory] | None = None
    tried, most = 0, capacity(cluster)
    jobs = _recomputations(job, limits)
    models = {j.recompute: MemoryModel(outline, j, cluster) for j in jobs}
    for layout in layouts(outline, job, cluster, ranks, limits):
        for j in jobs:
            memory = models[j.recompute].worst(layout)
            tried += 1
            if smallest is None or memory.total < smallest[2].total:
                smallest = (layout, j, memory)
            if memory.total <= most:
                fitting.append((layout, j, memory))
                # Without recomputation is always faster.
                break
    candidates = _timed(outline, cluster, fitting, goal, limits, keep)
    if smallest is None:
        return Found((), None, None, job, tried)
    return Found(tuple(candidates), smallest[0], smallest[2], smallest[1], tried)


def _recomputations(job: Job, limits: Limits) -> tuple[Job, ...]:
    whole = replace(job, recompute=Recompute("all"))
    kept = replace(job, recompute=Recompute("none"))
    if limits.recompute == "layer":
        return (whole,)
    return (kept,) if limits.recompute == "none" else (kept, whole)


def _timed(
    outline: Outline, cluster: Cluster, fitting: list[tuple[Layout, Job, StageMemory]], goal: Goal,
    limits: Limits, keep: int,
) -> list[Candidate]:
    models: dict[Recompute, TimeModel] = {}
    candidates = []
    if goal == "fits":
        fitting = sorted(fitting, key=lambda item: item[2].total)[:keep]
    for layout, job, memory in fitting:
        if job.recompute not in models:
            models[job.recompute] = TimeModel(outline, job, cluster)
        exchanges = dispatcher_seconds(outline, job, cluster, layout.degrees)
        chosen = limits.dispatcher or _best(exchanges)
        layout = replace(layout, dispatcher=chosen)
        step = models[job.recompute].step(layout)
        tokens = job.seq_len * job.micro_batch * micro_batches(job, layout.degrees) * layout.degrees.data
        candidates.append(Candidate(layout, job, memory, step, tokens / step.seconds, exchanges))
    if goal != "fits":
        candidates.sort(key=lambda c: -c.tokens_per_second)
    return candidates[:keep]


def _best(exchanges: dict[str, float]) -> Dispatcher:
    # All-gather and flat need no kernel of their own, so that they win a tie.
    order: tuple[Dispatcher, ...] = ("all_gather", "flat", "dedup")
    return min(order, key=lambda name: exchanges.get(name, 0.0))


def dispatcher_seconds(
    outline: Outline, job: Job, cluster: Cluster, degrees: Degrees
) -> dict[str, float]:
    """Seconds of one dispatch and combination with each dispatcher; empty without experts."""
    layer = next((x for x in outline.layers if isinstance(x.ffn, MoESpec)), None)
    if layer is None or degrees.ep == 1:
        return {}
    ffn = layer.ffn
    assert isinstance(ffn, MoESpec), "chosen by its kind"
    tokens = job.micro_batch * job.seq_len / degrees.cp / degrees.tp
    width = routed_width(layer, outline.hidden_size)
    return {
        name: 2 * exchange(cluster, expert_span(cluster, degrees), name, tokens, ffn.num_experts,
                           ffn.top_k, 2 * width, job.routing).seconds
        for name in DISPATCHERS
    }


def layouts(
    outline: Outline, job: Job, cluster: Cluster, ranks: int, limits: Limits
) -> Iterator[Layout]:
    """Every legal division of the ranks.

    Sharded and resident bases are two layouts of the same degrees.
    """
    known: dict[int, tuple[Stage, ...]] = {}
    for degrees in all_degrees(outline, job, cluster, ranks, limits):
        if degrees.pp not in known:
            known[degrees.pp] = split(outline, degrees.pp, limits.stages)
        stages = known[degrees.pp]
        divides = degrees.dp_shard * degrees.cp > 1 or degrees.expert_shard > 1
        yield Layout(degrees, stages, "dedup", resident=True)
        if divides and job.stack.shards == "all":
            yield Layout(degrees, stages, "dedup", resident=False)


def all_degrees(
    outline: Outline, job: Job, cluster: Cluster, ranks: int, limits: Limits
) -> Iterator[Degrees]:
    """Every legal set of degrees."""
    heads = common_heads(outline)
    experts = expert_count(outline)
    for pp in _choices(ranks, limits.pp, outline.num_layers):
        for tp in _choices(ranks // pp, limits.tp, min(_MAX_TP, cluster.ranks_per_host)):
            if heads % tp and outline.num_layers:
                continue
            for cp in _choices(ranks // pp // tp, limits.cp, job.seq_len // _MIN_TOKENS_PER_RANK):
                if heads % (tp * cp) or job.seq_len % cp:
                    continue
                data = ranks // pp // tp // cp
                if job.micro_batch * data > job.global_batch or job.global_batch % data:
                    continue
                yield from _expert_degrees(limits, experts, pp, tp, cp, data)


def _expert_degrees(
    limits: Limits, experts: int, pp: int, tp: int, cp: int, data: int
) -> Iterator[Degrees]:
    for ep in _divisors(experts):
        if limits.ep not in (None, ep):
            continue
        shards = {data}
        if (least := ep // gcd(ep, cp * tp)) and data % least == 0:
            shards.add(least)
        if limits.dp_shard is not None:
            shards = {limits.dp_shard} if data % limits.dp_shard == 0 else set()
        for shard in sorted(shards):
            if (shard * cp * tp) % ep == 0:
                yield Degrees(pp, data // shard, shard, cp, tp, ep)


def _choices(ranks: int, fixed: int | None, most: int) -> list[int]:
    if fixed is not None:
        return [fixed] if ranks % fixed == 0 else []
    return [n for n in _divisors(ranks) if n <= max(1, most)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def expert_count(outline: Outline) -> int:
    """Experts that expert parallelism must divide, 1 without any."""
    counts = {layer.ffn.num_experts for layer in outline.layers if isinstance(layer.ffn, MoESpec)}
    return gcd(*counts) if counts else 1


def common_heads(outline: Outline) -> int:
    """Heads that tensor and context parallelism must divide, in every mixer."""
    heads = []
    for layer in dict.fromkeys(outline.layers):
        m = layer.mixer
        if isinstance(m, KDASpec | MLASpec | GQASpec):
            heads.append(m.num_heads)
        elif isinstance(m, GatedDeltaSpec):
            heads.append(m.key_heads)
    return gcd(*heads)
