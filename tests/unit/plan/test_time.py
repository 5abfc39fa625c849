"""Time: pipeline orders, collectives, dispatchers, and what makes a step longer."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import load_cluster
from trimtab.plan.job import Job, Recompute, choose_adapters
from trimtab.plan.memory import Layout
from trimtab.plan.network import distinct_groups, exchange
from trimtab.plan.pipeline import estimate, order, simulate
from trimtab.plan.placement import Degrees, describe_ranks, expert_span, span_of
from trimtab.plan.reliability import daly_interval, saving
from trimtab.plan.stages import split
from trimtab.plan.timing import TimeModel

A3, H200 = load_cluster("ascend-a3"), load_cluster("h200")
DAY = 86400.0


@pytest.fixture(scope="module")
def k3() -> Outline:
    return load_outline(preset_config("kimi-k3"))


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_an_even_pipeline_takes_its_batches_and_one_fill(stages: int) -> None:
    seconds, slots = simulate([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), 16)
    assert seconds == pytest.approx(3.0 * (16 + stages - 1))
    assert estimate([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), 16) == seconds
    assert len(slots) == 2 * stages * 16


def test_a_stage_never_does_two_things_and_holds_no_more_than_its_depth() -> None:
    _, slots = simulate([1.0, 3.0, 1.0, 2.0], [2.0, 3.0, 2.0, 4.0], [0.5] * 3, 12)
    for stage in range(4):
        mine = sorted((s for s in slots if s.stage == stage), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
        held = peak = 0
        for slot in mine:
            held += 1 if slot.is_forward else -1
            peak = max(peak, held)
        assert held == 0 and peak <= 4 - stage


def test_the_slowest_stage_sets_the_pace() -> None:
    uneven, _ = simulate([1.0, 2.0, 1.0], [1.0, 2.0, 1.0], [0.0, 0.0], 64)
    assert 64 * 4.0 <= uneven <= 64 * 4.0 + 4.0


def test_every_pass_runs_once() -> None:
    for stage in range(4):
        passes = order(stage, 4, 6)
        assert sorted(passes) == sorted([(f, b) for f in (True, False) for b in range(6)])


@pytest.mark.parametrize(
    ("experts", "chosen", "groups", "wanted"),
    [(896, 16, 2, 2.00), (896, 16, 4, 3.96), (896, 16, 8, 7.07), (896, 16, 16, 10.35),
     (896, 16, 32, 12.83), (896, 16, 64, 14.36), (256, 8, 8, 5.29), (256, 8, 32, 7.27)],
)
def test_distinct_groups_of_a_token(experts: int, chosen: int, groups: int, wanted: float) -> None:
    assert distinct_groups(experts, chosen, groups) == pytest.approx(wanted, abs=0.01)


def test_sixteen_choices_of_eight_ranks_are_cheaper_gathered_than_sent_one_by_one() -> None:
    span = expert_span(H200, Degrees(dp_shard=8, ep=8))
    sent = {
        name: exchange(H200, span, name, 8192, 896, 16, 2 * 3584, 1.0)
        for name in ("flat", "all_gather", "dedup")
    }
    # 8192 tokens in the latent of 3584: 822 and 411 MB each way.
    assert sent["flat"].bytes == pytest.approx(822e6, rel=0.01)
    assert sent["all_gather"].bytes == pytest.approx(411e6, rel=0.01)
    assert sent["dedup"].bytes < sent["all_gather"].bytes
    assert sent["all_gather"].seconds < sent["flat"].seconds


def test_groups_span_the_networks_they_must() -> None:
    inside, pod = span_of(A3, 16, 1), span_of(A3, 64, 1)
    assert inside.outer is None and inside.hosts == 1
    assert pod.outer is not None and pod.outer.name == "pod" and pod.hosts == 4
    far = span_of(A3, 64, 64)
    assert far.outer is not None and far.outer.name == "fabric" and far.per_host == 1


def test_ranks_are_dies() -> None:
    assert describe_ranks(A3, 64) == "64 ranks = 32 packages = 4 hosts, 64 GiB each"
    assert describe_ranks(H200, 16) == "16 ranks = 2 hosts, 139.8 GiB each"


def step(outline: Outline, degrees: Degrees, **values: object) -> float:
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"), global_batch=64)
    job = replace(job, **values)  # type: ignore[arg-type]
    layout = Layout(degrees, split(outline, degrees.pp), "dedup", resident=True)
    return TimeModel(outline, job, H200).step(layout).seconds


def test_frozen_matrices_have_no_weight_gradient(k3: Outline) -> None:
    degrees = Degrees(dp_shard=64, ep=64)
    lora = step(k3, degrees, recompute=Recompute("none"))
    full = step(k3, degrees, recompute=Recompute("none"), method="full", base_dtype="bf16")
    again = step(k3, degrees)
    assert 1.2 < full / lora < 1.8
    assert 1.3 < again / lora < 1.6


def test_parts_sum_to_the_step(k3: Outline) -> None:
    job = Job(adapters=choose_adapters(k3, 32, ("attention",), "none"), global_batch=64)
    layout = Layout(Degrees(pp=4, dp_shard=16, ep=16), split(k3, 4), "flat", resident=True)
    traced = TimeModel(k3, job, H200).step(layout, trace=True)
    assert sum(traced.parts.values()) == pytest.approx(traced.seconds)
    assert traced.slots and 0 < traced.exposed_exchange_share < 1


def test_imbalance_slows_the_experts(k3: Outline) -> None:
    degrees = Degrees(dp_shard=64, ep=64)
    assert step(k3, degrees, routing=1.6) > 1.1 * step(k3, degrees, routing=1.0)


@pytest.mark.parametrize(
    ("blocking", "days", "hours"),
    [(30, 33, 3.6), (30, 8.3, 1.8), (30, 2.1, 0.9), (400, 33, 13), (400, 8.3, 6.5), (400, 2.1, 3.2)],
)
def test_saving_intervals(blocking: float, days: float, hours: float) -> None:
    assert daly_interval(blocking, days * DAY) / 3600 == pytest.approx(hours, rel=0.05)


def test_more_hosts_fail_more_often() -> None:
    one, many = (saving(400, 600, hosts, 0.0065) for hosts in (8, 1024))
    assert many.interval < one.interval and many.waste > one.waste
    assert one.mean_time_between_failures == pytest.approx(DAY / 8 / 0.0065)
