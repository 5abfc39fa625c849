"""The whole job: hours from download to evaluation, memory and disk of a host, cost.

Knows: how often a state is saved, what failures take. Does not know: data files; how many tokens
there are is told to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from trimtab.plan.planner import Plan
from trimtab.plan.reliability import Saving, saving
from trimtab.plan.serving import ServingModel
from trimtab.plan.stages import Stage
from trimtab.plan.states import States, base_bytes
from trimtab.plan.workload import Workload

# Imports, kernels compiled and first collectives: of one host, and again for each doubling.
_STARTUP_SECONDS = 60.0
# Host memory of one process with torch and the libraries of a device.
_PROCESS_BYTES = 3 * 2**30
# What does not depend on routing.
_FIXED = ("download", "conversion", "load")


@dataclass(frozen=True, slots=True)
class WholeJob:
    """A job from the first download to the last score.

    Args:
        work: what it does.
        tokens: trained on, pads included.
        hours: by phase; their sum is the job.
        band_hours: total with balanced and with worst routing.
        saving: when to save the training state.
        saved_bytes: of one saved state: adapter and moments.
        host_memory: bytes per host: processes, two layers of the release while loading, and
            offloaded state.
        host_disk: bytes per host: its part of the converted weights and its part of the states.
        shared_storage: bytes for all hosts: the release and the converted weights.
        host_has: host memory and disk of the cluster.
        cost: from load to evaluation; None without a price.
        currency: of the cost.
    """

    work: Workload
    tokens: int
    hours: dict[str, float]
    band_hours: tuple[float, float]
    saving: Saving
    saved_bytes: float
    host_memory: float
    host_disk: float
    shared_storage: float
    host_has: tuple[float, float]
    cost: float | None
    currency: str

    @property
    def total_hours(self) -> float:
        """From the first download to the last score."""
        return sum(self.hours.values())


def whole_job(plan: Plan, work: Workload) -> WholeJob:
    """Plan the whole job.

    Args:
        plan: with a layout.
        work: steps, validation and evaluation.
    """
    best, question = plan.best, plan.question
    assert best is not None, "a job is planned where there is a layout"
    cluster, outline = question.cluster, question.outline
    here = min(question.ranks, cluster.ranks_per_host)
    hosts = ceil(question.ranks / cluster.ranks_per_host)
    stored = float(sum(outline.stored_bytes.values()))
    # As it is kept: a conversion to another dtype changes the bytes that are written and loaded.
    base = sum(base_bytes(outline, question.job, param) for param in outline.params)
    per_host = min(base, best.memory.lines["base_weights"] * here)
    saved = saved_state_bytes(plan)
    disk = cluster.storage_bandwidth.value
    load = per_host / disk + _STARTUP_SECONDS * (1 + log2(hosts))
    save = saving(saved / hosts / disk + 1.0, load, hosts, cluster.failures.value)
    forward, backward = sum(best.step.forward), sum(best.step.backward)
    reads = best.tokens_per_second * (forward + backward) / max(1e-12, forward)
    seconds = {
        "download": stored / cluster.download_bandwidth.value,
        "conversion": (stored + base) / hosts / disk,
        "load": load,
        "training": work.steps * best.step.seconds / (1 - min(0.9, save.waste)),
        "validation": work.validation_tokens / reads,
        # The base and the adapted model are both scored.
        "evaluation": 2 * (work.scored_tokens / reads + _writing(plan, work)),
    }
    hours = {name: value / 3600 for name, value in seconds.items()}
    total = sum(hours.values())
    fixed = sum(hours[name] for name in _FIXED)
    ratios = [band.step_seconds / best.step.seconds for band in plan.bands]
    rented = total - hours["download"] - hours["conversion"]
    return WholeJob(
        work=work, tokens=work.steps * work.tokens_per_step, hours=hours,
        band_hours=(fixed + min(ratios) * (total - fixed), fixed + max(ratios) * (total - fixed)),
        saving=save, saved_bytes=saved,
        host_memory=here * (_PROCESS_BYTES + best.memory.host) + 2 * stored / outline.num_layers,
        host_disk=per_host + work.saved_states * saved / hosts, shared_storage=stored + base,
        host_has=(cluster.host_memory.value, cluster.host_disk.value),
        cost=None if cluster.price is None else cluster.price * question.ranks * rented, currency=cluster.currency,
    )


def saved_state_bytes(plan: Plan) -> float:
    """One saved training state: trained elements, their masters and their moments."""
    job, outline = plan.question.job, plan.question.outline
    block = States(outline, job).of_stage(Stage(0, 0, outline.num_layers, True, True), 1)
    elements = block.tp_elements + block.whole_elements + block.expert_elements
    return elements * (job.stack.weight_bytes + job.stack.master_bytes + job.stack.moment_bytes)


def _writing(plan: Plan, work: Workload) -> float:
    """Seconds in which one model writes all answers of the evaluation, each as long as allowed."""
    if not work.answers:
        return 0.0
    q = plan.question
    length = ceil((work.scored_tokens + work.answer_tokens) / work.answers)
    model = ServingModel(q.outline, q.job, q.cluster, 1, length)
    steps = work.answer_tokens / work.answers
    times = []
    for layout in model.layouts(q.ranks):
        groups = layout.dp * layout.replicas
        at_once = min(ceil(work.answers / groups), layout.requests // groups)
        rounds = ceil(work.answers / groups / at_once)
        step = sum(model.decode_parts(layout.tp, layout.dp, at_once).values())
        times.append(rounds * steps * step)
    return min(times, default=0.0)
