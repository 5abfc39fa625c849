"""A plan for serving: the layouts, what limits them, as plain values and as words.

Knows: how layouts compare. Does not know: terminals, engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.config.cluster_document import Grade
from trimtab.plan.grades import memory_grades, used_grades, worst_of
from trimtab.plan.placement import describe_ranks, require_ranks
from trimtab.plan.question import Question
from trimtab.plan.report import million_cost
from trimtab.plan.search import capacity
from trimtab.plan.serving import ServingLayout, ServingModel
from trimtab.units import format_bytes, format_count, format_seconds

COLUMNS = ("tp", "dp", "copies", "GiB", "requests", "a token", "writes/s", "reads/s", "adapters")


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """An answer.

    Args:
        question: model, cluster, ranks; its sequence length is that of the longest request.
        adapters: resident at once.
        layouts: that hold a request per group, the fastest writer first.
        binding_limit: what stops or slows serving, in words.
        worst_grade: of the cluster's numbers that were used.
        weak_inputs: names of the numbers with that grade.
    """

    question: Question
    adapters: int
    layouts: tuple[ServingLayout, ...]
    binding_limit: str
    worst_grade: Grade
    weak_inputs: tuple[str, ...]

    @property
    def headline(self) -> str:
        """Ranks, packages, hosts, memory."""
        return describe_ranks(self.question.cluster, self.question.ranks)


def plan_serving(question: Question, adapters: int) -> ServingPlan:
    """Find the layouts that serve a model with so many adapters.

    Args:
        question: its job says base dtype, adapter form and the longest request.
        adapters: resident at once.

    Raises:
        ConfigError: the cluster has fewer ranks than asked for.
    """
    q = question
    require_ranks(q.cluster, q.ranks, "--devices")
    model = ServingModel(q.outline, q.job, q.cluster, adapters, q.job.seq_len)
    layouts = tuple(model.layouts(q.ranks))
    grades = memory_grades(q.cluster)
    if layouts:
        grades = used_grades(q.cluster, q.outline, q.job, model.degrees(layouts[0].tp, layouts[0].dp))
    worst, weak = worst_of(grades)
    limit = _time_limit(layouts[0]) if layouts else _memory_limit(model, q)
    return ServingPlan(q, adapters, layouts, limit, worst, weak)


def _time_limit(layout: ServingLayout) -> str:
    parts = layout.decode_parts
    name = max(parts, key=lambda part: parts[part])
    verb = "reading " if name in ("weights", "adapters", "caches") else ""
    return f"time: {verb}{name}, {parts[name] / layout.decode_seconds:.0%} of the time between two tokens"


def _memory_limit(model: ServingModel, question: Question) -> str:
    needed, has = model.least_memory(question.ranks), capacity(question.cluster)
    return (
        f"memory: one request of {question.job.seq_len:,} tokens and {model.adapters} adapters need "
        f"{format_bytes(needed)} of {format_bytes(has)} on a rank in the smallest layout, "
        f"{format_bytes(needed - has)} too much"
    )


def serving_as_dict(plan: ServingPlan) -> dict[str, object]:
    """The whole plan; bytes, seconds and tokens per second throughout."""
    q = plan.question
    return {
        "model": q.outline.name, "family": q.outline.family, "cluster": q.cluster.name,
        "placement": plan.headline, "devices": q.ranks, "feasible": bool(plan.layouts),
        "base_dtype": q.job.base_dtype, "request_tokens": q.job.seq_len, "adapters": plan.adapters,
        "memory_limit_bytes": capacity(q.cluster), "binding_limit": plan.binding_limit,
        "worst_input_grade": plan.worst_grade, "weak_inputs": list(plan.weak_inputs),
        "layouts": [
            {
                "tp": x.tp, "dp": x.dp, "ep": x.tp * x.dp, "replicas": x.replicas,
                "memory_per_rank_bytes": {**x.memory, "total": sum(x.memory.values())},
                "adapter_bytes_per_rank": x.adapter_bytes, "most_adapters": x.most_adapters,
                "requests": x.requests, "decode_seconds": x.decode_seconds,
                "decode_parts_s": x.decode_parts, "tokens_per_second": x.tokens_per_second,
                "prefill_tokens_per_second": x.prefill_tokens_per_second,
                "cost_per_million_tokens": million_cost(q, x.tokens_per_second),
                "worst_input_grade": plan.worst_grade,
            }
            for x in plan.layouts
        ],
    }


def layout_row(layout: ServingLayout) -> tuple[str, ...]:
    """One layout in words, by `COLUMNS`; the last is how many adapters there would be room for."""
    return (
        str(layout.tp), str(layout.dp), str(layout.replicas),
        f"{sum(layout.memory.values()) / 2**30:.1f}", f"{layout.requests:,}",
        format_seconds(layout.decode_seconds), format_count(layout.tokens_per_second),
        format_count(layout.prefill_tokens_per_second), f"{layout.most_adapters:,}",
    )
