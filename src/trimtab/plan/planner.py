"""From a question to a plan: goals, routing bands, what limits.

Knows: how a goal varies ranks or sequence length. Does not know: terminals, files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from trimtab.config.cluster_document import Grade
from trimtab.plan.changes import Change, helpful
from trimtab.plan.grades import memory_grades, used_grades, worst_of
from trimtab.plan.legal import require_possible
from trimtab.plan.memory import MemoryModel, StageMemory
from trimtab.plan.placement import describe_ranks, require_ranks
from trimtab.plan.question import Question
from trimtab.plan.search import Candidate, Found, capacity
from trimtab.plan.timing import StepTime, TimeModel
from trimtab.units import format_bytes

CHANGES = 3
"""Changes that are named when nothing fits."""

# Most tokens of an expert-parallel rank over the mean. `typical` is a prior: no trained router's
# value per step is published; `worst` is that of an untrained router of 896 experts.
BANDS: dict[str, float] = {"balanced": 1.0, "typical": 1.15, "worst": 1.6}

_LIMIT_WORDS = {
    "gemm": "dense matrix products", "grouped": "grouped products of the experts",
    "attention": "attention", "linear_attention": "the delta rule",
    "vector": "element-wise kernels and their memory traffic", "adapters": "adapters",
    "recomputation": "recomputation of the forward pass", "expert_exchange": "all-to-all of tokens",
    "tensor_exchange": "tensor-parallel collectives", "context_exchange": "context-parallel exchange",
    "parameter_gather": "gathering divided parameters", "pipeline_bubble": "pipeline bubbles, which more tokens per step would fill",
    "gradient_exchange": "gradient reduction", "optimizer": "the optimizer", "head": "output head",
    "host": "the host, which launches kernels too slowly",
}


@dataclass(frozen=True, slots=True)
class Band:
    """The chosen layout under one routing assumption."""

    name: str
    load: float
    memory: float
    step_seconds: float


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
        ConfigError: TT105, the cluster has fewer ranks than asked for, or what is fixed can be
            part of no layout.
    """
    require_ranks(question.cluster, question.ranks, "--devices")
    require_possible(question.outline, question.job, question.ranks, question.limits)
    question, found = _by_goal(question)
    if not found.candidates:
        stages = _smallest_stages(question, found)
        limit = _memory_limit(question, found)
        changes = tuple(islice(helpful(question), CHANGES))
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
        return _fewest(question)
    if question.goal == "longest_context":
        return _longest(question)
    if question.goal == "cheapest_token":
        fewer = [replace(question, ranks=ranks) for ranks in _fewer(question)]
        answers = [(q, q.search()) for q in fewer if q.could_fit()]
        able = [(q, found) for q, found in answers if found.candidates]
        if able:
            return max(able, key=lambda a: a[1].candidates[0].tokens_per_second / a[0].ranks)
    return question, question.search()


def _fewest(question: Question) -> tuple[Question, Found]:
    """Doubling up to what fits, then whole hosts between that and the last that does not."""
    below = 0
    for ranks in _fewer(question):
        asked = replace(question, ranks=ranks)
        found = asked.search() if asked.could_fit() else None
        if found is None or not found.candidates:
            below = ranks
            continue
        best, host = (asked, found), question.cluster.ranks_per_host
        for between in range(-(-(below + 1) // host) * host, ranks, host):
            smaller = replace(question, ranks=between)
            if smaller.could_fit() and (less := smaller.search()).candidates:
                return smaller, less
        return best
    return question, question.search()


def _fewer(question: Question) -> list[int]:
    """Numbers of ranks to try, from few to many: doubling, whole hosts once there is one."""
    host, ranks = question.cluster.ranks_per_host, question.ranks
    inside = {2**n for n in range(host.bit_length()) if 2**n <= min(host, ranks)}
    whole = {host * 2**n for n in range(ranks.bit_length()) if host * 2**n <= ranks}
    return sorted({*inside, *whole, ranks})


def _longest(question: Question) -> tuple[Question, Found]:
    length, best = 4096, (question, question.search())
    longest = question.outline.max_position_embeddings
    while length <= longest:
        longer = question.with_length(length)
        found = longer.search()
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
        job = question.job
        each = "one sequence" if job.micro_batch == 1 else f"micro-batches of {job.micro_batch} sequences"
        return (
            f"layout: no division of {question.ranks} ranks leaves each data-parallel rank {each} of "
            f"the {job.global_batch} x {job.seq_len:,} tokens of a step; more tokens per step "
            "(--tokens-per-step) or fewer ranks are needed"
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
