"""From a question to a plan: goals, routing bands, what limits, what would help.

Knows: how a goal varies ranks or sequence length, and the changes that are worth trying when
nothing fits. Does not know: terminals, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from trimtab.arch.outline import Outline
from trimtab.config.cluster import Cluster, Grade
from trimtab.plan.grades import memory_grades, used_grades, worst_of
from trimtab.plan.job import Adapters, Job, Recompute
from trimtab.plan.memory import MemoryModel, StageMemory
from trimtab.plan.placement import describe_ranks, require_ranks
from trimtab.plan.search import Candidate, Found, Goal, Limits, capacity, search
from trimtab.plan.timing import StepTime, TimeModel
from trimtab.units import format_bytes

# Most tokens of an expert-parallel rank over the mean. `typical` is a prior: no trained router's
# value per step is published; `worst` is that of an untrained router of 896 experts.
BANDS: dict[str, float] = {"balanced": 1.0, "typical": 1.15, "worst": 1.6}

_LIMIT_WORDS = {
    "gemm": "dense matrix products", "grouped": "grouped products of the experts",
    "attention": "attention", "linear_attention": "the delta rule",
    "vector": "element-wise kernels and their memory traffic", "adapters": "adapters",
    "recomputation": "recomputation of the forward pass", "expert_exchange": "all-to-all of tokens",
    "tensor_exchange": "tensor-parallel collectives", "context_exchange": "context-parallel exchange",
    "parameter_gather": "gathering divided parameters", "pipeline_bubble": "pipeline bubbles",
    "gradient_exchange": "gradient reduction", "optimizer": "the optimizer", "head": "output head",
    "host": "the host, which launches kernels too slowly",
}


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for.

    Args:
        outline: the model.
        job: what is run.
        cluster: the machine.
        ranks: of the job.
        goal: what the best layout is.
        limits: what is fixed.
        tokens_per_step: tokens of the global batch, from which its sequences follow.
    """

    outline: Outline
    job: Job
    cluster: Cluster
    ranks: int
    goal: Goal
    limits: Limits
    tokens_per_step: int

    def with_length(self, seq_len: int) -> Question:
        """The same with another sequence length and as many tokens per step."""
        batch = max(1, self.tokens_per_step // seq_len)
        return replace(self, job=replace(self.job, seq_len=seq_len, global_batch=batch))


@dataclass(frozen=True, slots=True)
class Band:
    """The chosen layout under one routing assumption."""

    name: str
    load: float
    memory: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes the job fit, and the memory it then needs."""

    text: str
    memory: float


@dataclass(frozen=True, slots=True)
class Plan:
    """An answer.

    Args:
        question: as answered; a goal may have changed ranks or length.
        found: what the search saw.
        best: the chosen layout with its pipeline simulated, None if nothing fits.
        stages: memory of every stage of it, or of the smallest layout.
        bands: routing assumptions.
        binding_limit: what stops or slows the job, in words.
        changes: what would help, the cheapest first, if nothing fits.
        worst_grade: of the cluster's numbers that were used.
        weak_inputs: names of the numbers with that grade.
    """

    question: Question
    found: Found
    best: Candidate | None
    stages: tuple[StageMemory, ...]
    bands: tuple[Band, ...]
    binding_limit: str
    changes: tuple[Change, ...]
    worst_grade: Grade
    weak_inputs: tuple[str, ...]

    @property
    def headline(self) -> str:
        """Ranks, packages, hosts, memory."""
        return describe_ranks(self.question.cluster, self.question.ranks)


def make_plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: the cluster has fewer ranks than asked for.
    """
    require_ranks(question.cluster, question.ranks, "--devices")
    question, found = _by_goal(question)
    if not found.candidates:
        stages = _smallest_stages(question, found)
        limit = _memory_limit(question, found)
        changes = tuple(islice(_helpful(question), 3))
        worst, weak = worst_of(memory_grades(question.cluster))
        return Plan(question, found, None, stages, (), limit, changes, worst, weak)
    best = found.candidates[0]
    model = TimeModel(question.outline, best.job, question.cluster)
    best = replace(best, step=model.step(best.layout, trace=True))
    memory = MemoryModel(question.outline, best.job, question.cluster)
    degrees = best.layout.degrees
    worst, weak = worst_of(used_grades(question.cluster, question.outline, best.job, degrees))
    return Plan(
        question, found, best, memory.of_layout(best.layout), tuple(_bands(question, best)),
        _time_limit(best), (), worst, weak,
    )


def _by_goal(question: Question) -> tuple[Question, Found]:
    if question.goal == "fewest_devices":
        for ranks in _fewer(question):
            found = _run(replace(question, ranks=ranks))
            if found.candidates:
                return replace(question, ranks=ranks), found
    if question.goal == "longest_context":
        return _longest(question)
    if question.goal == "cheapest_token":
        answers = [(r, _run(replace(question, ranks=r))) for r in _fewer(question)]
        able = [(r, f) for r, f in answers if f.candidates]
        if able:
            ranks, found = max(able, key=lambda a: a[1].candidates[0].tokens_per_second / a[0])
            return replace(question, ranks=ranks), found
    return question, _run(question)


def _run(question: Question) -> Found:
    q = question
    return search(q.outline, q.job, q.cluster, q.ranks, q.goal, q.limits)


def _fewer(question: Question) -> list[int]:
    """Numbers of ranks to try, from few to many: whole hosts, doubling."""
    host = question.cluster.ranks_per_host
    counts = {question.ranks}
    ranks = min(host, question.ranks)
    while ranks < question.ranks:
        counts.add(ranks)
        ranks *= 2
    return sorted(counts)


def _longest(question: Question) -> tuple[Question, Found]:
    length, best = 4096, (question, _run(question))
    longest = question.outline.max_position_embeddings
    while length <= longest:
        longer = question.with_length(length)
        found = _run(longer)
        if not found.candidates:
            break
        best = (longer, found)
        length *= 2
    return best


def _bands(question: Question, best: Candidate) -> Iterator[Band]:
    for name, load in BANDS.items():
        job = replace(best.job, routing=load)
        memory = MemoryModel(question.outline, job, question.cluster).worst(best.layout)
        step = TimeModel(question.outline, job, question.cluster).step(best.layout)
        yield Band(name, load, memory.total, step.seconds)


def _time_limit(best: Candidate) -> str:
    parts = best.step.parts
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / best.step.seconds
    return f"time: {_LIMIT_WORDS.get(name, name)}, {share:.0%} of the step"


def limits_in_order(step: StepTime) -> list[tuple[str, float]]:
    """What a step goes into, in words, the largest share first."""
    named = ((_LIMIT_WORDS.get(k, k), v / step.seconds) for k, v in step.parts.items())
    return sorted((item for item in named if item[1] > 0), key=lambda item: -item[1])


def _memory_limit(question: Question, found: Found) -> str:
    if found.smallest_memory is None:
        batch = question.job.global_batch
        return (
            f"layout: no division of {question.ranks} ranks is legal for {batch} sequences of "
            f"{question.job.seq_len} tokens; more tokens per step or fewer ranks are needed"
        )
    memory = found.smallest_memory
    line = max(memory.lines, key=lambda name: memory.lines[name])
    short = memory.total - capacity(question.cluster)
    return (
        f"memory: the smallest layout needs {format_bytes(memory.total)} of "
        f"{format_bytes(capacity(question.cluster))} on a rank of stage {memory.stage}, "
        f"{format_bytes(short)} too much; most of it is {line.replace('_', ' ')} "
        f"({format_bytes(memory.lines[line])})"
    )


def _smallest_stages(question: Question, found: Found) -> tuple[StageMemory, ...]:
    if found.smallest is None:
        return ()
    model = MemoryModel(question.outline, found.smallest_job, question.cluster)
    return model.of_layout(found.smallest)


def _helpful(question: Question) -> Iterator[Change]:
    """Changes that make the job fit, from those that cost nothing to those that cost machines."""
    for text, change in _changes(question):
        changed = change(question)
        if changed is None:
            continue
        found = _run(replace(changed, goal="fits"))
        if found.candidates:
            yield Change(text, found.candidates[0].memory.total)


def _changes(question: Question) -> Iterator[tuple[str, Callable[[Question], Question | None]]]:
    job, limits = question.job, question.limits

    def with_job(**values: object) -> Callable[[Question], Question | None]:
        return lambda q: replace(q, job=replace(q.job, **values))  # type: ignore[arg-type]

    if limits.recompute == "none":
        yield ("recompute layers in the backward pass",
               lambda q: replace(q, limits=replace(q.limits, recompute="layer")))
    if job.base_dtype != "native" and job.method == "lora":
        yield "keep the base as released (--base-dtype native)", with_job(base_dtype="native")
    if limits != Limits():
        yield ("leave all degrees free",
               lambda q: replace(q, limits=Limits(recompute=q.limits.recompute)))
    if job.adapters is not None and job.adapters.experts == "per_expert":
        yield "share one side of the expert adapters (shared_outer)", with_job(
            adapters=replace(job.adapters, experts="shared_outer"))
    if job.adapters is not None and job.adapters.experts != "none":
        yield "no adapters on routed experts", with_job(adapters=_without_experts(job.adapters))
    if job.method == "full":
        yield ("train adapters instead of all parameters",
               with_job(method="lora", adapters=None, recompute=Recompute("all")))
    length = job.seq_len
    while length > 1024:
        length //= 2
        yield f"sequences of {length} tokens", lambda q, n=length: q.with_length(n)  # type: ignore[misc]
        if length * 8 <= job.seq_len:
            break
    for factor in (2, 4, 8, 16):
        ranks = question.ranks * factor
        yield f"{ranks} ranks ({factor} times as many)", lambda q, n=ranks: _grown(q, n)  # type: ignore[misc]


def _without_experts(adapters: Adapters) -> Adapters:
    leaves = frozenset(leaf for leaf in adapters.leaves if not leaf.startswith("routed_expert/"))
    names = frozenset(name for name in adapters.names if ".experts." not in name)
    return Adapters(adapters.rank, "none", names, leaves)


def _grown(question: Question, ranks: int) -> Question | None:
    most = question.cluster.max_ranks
    if most is not None and ranks > most:
        return None
    grown = max(question.tokens_per_step, question.job.seq_len * ranks)
    job = replace(question.job, global_batch=max(1, grown // question.job.seq_len))
    return replace(question, ranks=ranks, job=job, tokens_per_step=grown)
