"""Search: legal layouts, goals, what limits and what would help."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import load_cluster
from trimtab.errors import ConfigError
from trimtab.plan.job import Job, choose_adapters
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.question import Question
from trimtab.plan.report import coverage, parallel_section, plan_as_dict
from trimtab.plan.search import Goal, Limits, all_degrees, capacity


@pytest.fixture(scope="module")
def k3() -> Outline:
    return load_outline(preset_config("kimi-k3"))


def ask(
    outline: Outline, cluster: str, ranks: int, *, goal: Goal = "fastest", seq: int = 8192,
    limits: Limits | None = None, experts: str = "none", tokens: int = 4 * 2**20,
) -> Plan:
    adapters = choose_adapters(outline, 32, ("attention",), experts)  # type: ignore[arg-type]
    question = Question(
        outline, Job(adapters=adapters), load_cluster(cluster), ranks, goal, limits or Limits(), tokens
    )
    return make_plan(question.with_length(seq))


def test_degrees_fill_the_world_and_divide_heads_experts_and_batch(k3: Outline) -> None:
    job = Job(global_batch=96, adapters=None)
    found = list(all_degrees(k3, job, load_cluster("h200"), 96, Limits()))
    assert found
    for d in found:
        d.check()
        assert d.world == 96 and 896 % d.ep == 0 and 96 % (d.tp * d.cp) == 0 and 96 % d.data == 0


def test_packed_lora_fits_64_dies_of_64_gib(k3: Outline) -> None:
    plan = ask(k3, "ascend-a3", 64)
    assert plan.best is not None
    assert plan.headline.startswith("64 ranks = 32 packages = 4 hosts")
    assert plan.best.memory.total <= capacity(plan.question.cluster)
    assert plan.binding_limit.startswith("time: ") and plan.worst_grade == "inferred"


def test_what_does_not_fit_names_the_line_and_three_ways_out(k3: Outline) -> None:
    plan = ask(k3, "h200", 8)
    assert plan.best is None
    assert "memory: " in plan.binding_limit and "base weights" in plan.binding_limit
    assert len(plan.changes) == 3 and plan.changes[0].text.startswith("16 ranks")


def test_adapters_on_experts_are_the_first_thing_to_give_up(k3: Outline) -> None:
    plan = ask(k3, "ascend-a3", 32, experts="per_expert")
    assert plan.best is None
    assert "shared_outer" in plan.changes[0].text or "no adapters" in plan.changes[0].text


def test_fixed_degrees_are_kept(k3: Outline) -> None:
    plan = ask(k3, "gb300-nvl72", 64, limits=Limits(pp=8, tp=4, cp=2, ep=8, dispatcher="flat"))
    assert plan.best is not None
    degrees = plan.best.layout.degrees
    assert (degrees.pp, degrees.tp, degrees.cp, degrees.ep) == (8, 4, 2, 8)
    assert parallel_section(plan.best)["stages"] == [12] * 7 + [9]


def test_goals(k3: Outline) -> None:
    fewest = ask(k3, "h200", 64, goal="fewest_devices")
    assert fewest.question.ranks == 16 and fewest.best is not None
    # Not the next power of two, but the next host.
    dies = ask(k3, "ascend-a3", 64, goal="fewest_devices", experts="per_expert")
    assert dies.question.ranks == 48
    assert ask(k3, "ascend-a3", 32, experts="per_expert").best is None
    longest = ask(k3, "h200", 16, goal="longest_context")
    assert longest.best is not None and longest.question.job.seq_len > 8192
    fits = ask(k3, "h200", 64, goal="fits")
    fastest = ask(k3, "h200", 64)
    assert fits.best is not None and fastest.best is not None
    assert fits.best.memory.total < fastest.best.memory.total
    assert fits.best.tokens_per_second < fastest.best.tokens_per_second


def test_worse_routing_needs_more_of_both(k3: Outline) -> None:
    bands = ask(k3, "ascend-a3", 64).bands
    assert [band.name for band in bands] == ["balanced", "typical", "worst"]
    for a, b in itertools.pairwise(bands):
        assert a.memory < b.memory and a.step_seconds < b.step_seconds


@pytest.mark.parametrize("seq", [8192, 131072, 1048576])
def test_the_largest_pod_is_planned_in_seconds(k3: Outline, seq: int) -> None:
    started = time.process_time()
    plan = ask(k3, "ascend-950-superpod", 8192, seq=seq, tokens=8192 * 8192)
    assert time.process_time() - started < 5
    assert plan.best is not None


def test_json_has_the_promised_keys(k3: Outline) -> None:
    found = plan_as_dict(ask(k3, "ascend-a3", 64))
    layout = found["layouts"][0]  # type: ignore[index]
    assert set(layout) >= {
        "pp", "ep", "tp", "cp", "dp_shard", "dp_replicate", "dispatcher", "memory_per_rank_bytes",
        "step_time_s", "tokens_per_second", "exposed_all_to_all_share", "worst_input_grade",
    }
    memory = dict(layout["memory_per_rank_bytes"])
    sums = [memory.pop(name) for name in ("total", "reserved", "allocated")]
    assert sum(memory.values()) == pytest.approx(sums[0])


def test_more_ranks_than_there_are_is_an_error(k3: Outline) -> None:
    with pytest.raises(ConfigError, match="has 8192 ranks"):
        ask(k3, "ascend-950-superpod", 16384)


def test_a_dispatcher_can_be_fixed(k3: Outline) -> None:
    plan = ask(k3, "h200", 32, limits=Limits(dispatcher="all_gather"))
    assert plan.best is not None and plan.best.layout.dispatcher == "all_gather"
    assert replace(plan.best.layout, dispatcher="flat") != plan.best.layout


def test_measured_products_are_used_and_counted_as_measured(k3: Outline) -> None:
    plan = ask(k3, "h200", 16)
    share = plan.question.cluster.gemm_efficiency.value
    same, half = (
        make_plan(replace(plan.question, cluster=replace(
            plan.question.cluster, gemm_by_rows=((1, s), (8192, s)), grouped_by_rows=((1, 0.2),))))
        for s in (share, share / 2)
    )
    assert coverage(plan)["time_from_measured"] == 0  # type: ignore[index]
    assert 0.2 < coverage(same)["time_from_measured"] < 1  # type: ignore[index]
    assert same.best is not None and half.best is not None
    assert half.best.step.seconds > same.best.step.seconds
