"""What makes a job fit that does not: changes from those that cost nothing to those that cost machines.

Knows: which changes there are, and their order. Does not know: how a layout is found.

Each kind of change is tried from its smallest step on; where single ones do not suffice, pairs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from trimtab.config.cluster import Cluster, cluster_names, load_cluster
from trimtab.plan.job import DEFAULT_TARGETS, TRIMTAB, Adapters, Recompute, choose_adapters
from trimtab.plan.question import Question
from trimtab.plan.search import Limits

_SHORTEST = 1024
_SMALLEST_RANK = 8
_COMBINED = 2
_MORE_HOSTS = (1.5, 2, 3, 4, 6, 8, 16)

_Do = Callable[[Question], Question | None]
Step = tuple[str, _Do]


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes the job fit.

    Args:
        text: what to do.
        memory: bytes per rank that the job then needs.
        ranks: of it.
    """

    text: str
    memory: float
    ranks: int


def helpful(question: Question) -> Iterator[Change]:
    """Changes that make a job fit, the cheapest first: settings, adapters, length, then machines."""
    short: list[Step] = []
    for steps in (_settings(question), _adapters(question), _shorter(question)):
        if change := _first(question, steps):
            yield change
        elif steps:
            short.append(steps[min(len(steps), _COMBINED) - 1])
    more, larger = _more_ranks(question), list(_larger_devices(question.cluster))
    for kind in (more, *([_on(name)] for name in larger)):
        if change := _first(question, kind):
            yield change
    # What does not suffice alone, with the fewest more machines; then other machines, more of them.
    for (one, first), (two, then) in product(short, more[:_COMBINED]):
        if change := _tried(question, (f"{one}, and {two}", _both(first, then))):
            yield change
    for name in larger:
        if change := _first(question, [_on(name, ranks) for ranks in _whole_hosts(name)]):
            yield change


def _first(question: Question, steps: Sequence[Step]) -> Change | None:
    """The first step that suffices."""
    return next(filter(None, (_tried(question, step) for step in steps)), None)


def _both(first: _Do, then: _Do) -> _Do:
    def do(question: Question) -> Question | None:
        changed = first(question)
        return None if changed is None else then(changed)

    return do


def _tried(question: Question, step: Step) -> Change | None:
    text, change = step
    changed = change(question)
    if changed is None or not changed.could_fit():
        return None
    found = replace(changed, goal="fits").search()
    if not found.candidates:
        return None
    return Change(text, found.candidates[0].memory.total, changed.ranks)


def _settings(question: Question) -> Sequence[Step]:
    """What costs time at most."""
    job, limits = question.job, question.limits
    steps: list[Step] = []
    if job.micro_batch > 1:
        steps.append(("micro-batches of one sequence",
                      lambda q: replace(q, job=replace(q.job, micro_batch=1))))
    if job.base_dtype != "native" and job.method == "lora":
        steps.append(("keep the base as released (base_dtype native)",
                      lambda q: replace(q, job=replace(q.job, base_dtype="native"))))
    if limits.recompute == "none":
        steps.append(("recompute layers in the backward pass",
                      lambda q: replace(q, limits=replace(q.limits, recompute="layer"))))
    if replace(limits, recompute=None) != Limits():
        steps.append(("leave all degrees free",
                      lambda q: replace(q, limits=Limits(recompute=q.limits.recompute))))
    return steps


def _adapters(question: Question) -> Sequence[Step]:
    adapters = question.job.adapters
    if question.job.method == "full":
        return [("train adapters on attention in place of all parameters", _as_lora)]
    return [] if adapters is None else _fewer_adapters(adapters)


def _fewer_adapters(adapters: Adapters) -> Sequence[Step]:
    def with_adapters(changed: Adapters) -> _Do:
        return lambda q: replace(q, job=replace(q.job, adapters=changed))

    steps: list[Step] = []
    if adapters.experts == "per_expert":
        steps.append(("share one side of the expert adapters (shared_outer)",
                      with_adapters(replace(adapters, experts="shared_outer"))))
    if adapters.experts != "none":
        steps.append(("no adapters on routed experts", with_adapters(_without_experts(adapters))))
    rank = adapters.rank
    while rank > _SMALLEST_RANK:
        rank //= 2
        steps.append((f"adapters of rank {rank}", with_adapters(replace(adapters, rank=rank))))
    return steps


def _without_experts(adapters: Adapters) -> Adapters:
    leaves = frozenset(leaf for leaf in adapters.leaves if not leaf.startswith("routed_expert/"))
    names = frozenset(name for name in adapters.names if ".experts." not in name)
    return Adapters(adapters.rank, "none", names, leaves)


def _as_lora(question: Question) -> Question:
    adapters = choose_adapters(question.outline, 32, DEFAULT_TARGETS, "none")
    job = replace(question.job, method="lora", base_dtype="native", adapters=adapters, stack=TRIMTAB,
                  recompute=Recompute("all"))
    return replace(question, job=job)


def _shorter(question: Question) -> Sequence[Step]:
    steps: list[Step] = []
    length = question.job.seq_len // 2
    while length >= _SHORTEST:
        steps.append((f"sequences of {length:,} tokens", _with_length(length)))
        length //= 2
    return steps


def _with_length(length: int) -> _Do:
    return lambda q: q.with_length(length)


def _more_ranks(question: Question) -> Sequence[Step]:
    """Whole hosts, or parts of one."""
    host, ranks = question.cluster.ranks_per_host, question.ranks
    counts = {ranks * 2**n for n in range(1, 5) if ranks * 2**n <= host}
    counts |= {round(ranks * factor / host) * host for factor in _MORE_HOSTS}
    return [(f"{count} ranks", _with_ranks(count)) for count in sorted(counts) if count > ranks]


def _with_ranks(ranks: int) -> _Do:
    return lambda q: q.with_ranks(ranks)


def _larger_devices(cluster: Cluster) -> Iterator[str]:
    """Presets with more memory per rank, the least of it first."""
    known = [load_cluster(name) for name in cluster_names()]
    larger = sorted((c for c in known if c.memory.value > cluster.memory.value),
                    key=lambda c: c.memory.value)
    memories: list[float] = []
    for other in larger:
        if other.memory.value not in memories and other.device != "CPU":
            memories.append(other.memory.value)
            yield other.name


def _on(name: str, ranks: int | None = None) -> Step:
    other = load_cluster(name)
    many = "the same ranks" if ranks is None else f"{ranks} ranks"
    text = f"{many} of {name}, {other.memory.value / 2**30:.4g} GiB each"
    return text, lambda q: replace(q, cluster=other).with_ranks(ranks or q.ranks)


def _whole_hosts(name: str) -> list[int]:
    host = load_cluster(name).ranks_per_host
    return [host * 2**n for n in range(6)]
