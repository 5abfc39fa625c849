"""Which numbers of a cluster a prediction used, and how well the worst of them is known.

Knows: which group of ranks crosses which network. Does not know: formulas.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.arch.outline import Outline
from trimtab.arch.spec import MoESpec
from trimtab.config.cluster import Cluster, Collective
from trimtab.config.cluster_document import GRADES, Grade
from trimtab.plan.job import Job
from trimtab.plan.placement import Degrees, Span, expert_span, span_of

Grades = dict[str, Grade]

_DEVICE = (
    "memory", "context", "bf16_flops", "memory_bandwidth", "attention_efficiency", "memory_efficiency",
    "kernel_seconds",
)


def used_grades(cluster: Cluster, outline: Outline, job: Job, degrees: Degrees) -> Grades:
    """Grades of the numbers that memory and time of a layout follow from.

    Args:
        cluster: the machine.
        outline: the model.
        job: what is run.
        degrees: how it is divided.
    """
    names = [*_DEVICE]
    if not cluster.gemm_by_rows:
        names.append("gemm_efficiency")
    if not cluster.grouped_by_rows and any(isinstance(x.ffn, MoESpec) for x in outline.layers):
        names.append("grouped_efficiency")
    if job.precision != "bf16":
        names.append(f"{job.precision}_flops")
    if not job.graphs:
        names.append("host_seconds")
    if job.offload_optimizer:
        names.append("host_link")
    if degrees.world > 1:
        names += ["collective_seconds", "compute_overlap"]
    known = cluster.grades()
    found: Grades = {name: known[name] for name in names}
    for kind, span in _groups(cluster, degrees):
        for network, size in ((span.inner, span.per_host), (span.outer, span.size)):
            if network is None:
                continue
            rate = "pair_bandwidth" if kind == "send" else "bandwidth"
            for name in (f"{network.name}.{rate}", f"{network.name}.latency"):
                found[name] = known[name]
            name, grade = f"{network.name}.efficiency", network.reach_grade(kind, size)
            found[name] = max(found.get(name, grade), grade, key=GRADES.index)
    return found


def _groups(cluster: Cluster, degrees: Degrees) -> Iterator[tuple[Collective, Span]]:
    d = degrees
    if d.tp > 1:
        yield "all_gather", span_of(cluster, d.tp, 1)
    if d.cp > 1:
        yield "all_to_all", span_of(cluster, d.cp, d.tp)
    if d.ep > 1:
        yield "all_to_all", expert_span(cluster, d)
    if d.data * d.cp > 1:
        yield "all_gather", span_of(cluster, d.data * d.cp, d.tp)
    if d.expert_shard * d.dp_replicate > 1:
        yield "all_gather", span_of(cluster, d.expert_shard * d.dp_replicate, d.ep)
    if d.pp > 1:
        yield "send", span_of(cluster, 2, d.stage)


def memory_grades(cluster: Cluster) -> Grades:
    """Grades of what says whether a job fits."""
    return {name: cluster.grades()[name] for name in ("memory", "context")}


def worst_of(grades: Grades) -> tuple[Grade, tuple[str, ...]]:
    """The worst grade, and the names of the numbers that have it."""
    worst = max(grades.values(), key=GRADES.index)
    return worst, tuple(name for name, grade in grades.items() if grade == worst)
