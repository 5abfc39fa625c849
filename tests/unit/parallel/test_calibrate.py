"""Measuring this machine: figures are consistent, the document is one that `plan` reads."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import yaml

from trimtab.config.cluster import Cluster, parse_cluster
from trimtab.config.document import document_of
from trimtab.errors import RunError
from trimtab.parallel.calibrate import calibrate, document
from trimtab.parallel.collectives import CollectiveSpeed, measure_collectives
from trimtab.parallel.measure import DeviceSpeed, best_seconds, measure_device

SPEED = DeviceSpeed(
    name="d", dtype="bfloat16", memory=64 * 2**30, flops=4e14, gemm=((1, 0.1), (4096, 0.9)), grouped=((16, 0.5),),
    attention=0.4,
    memory_bandwidth=2e12, elementwise=0.8, kernel_seconds=4e-6, host_seconds=3e-6, host_link=5e10,
)  # fmt: skip


def cluster(values: dict[str, object]) -> Cluster:
    return parse_cluster(document_of(yaml.safe_dump(values), "test"))


def test_a_device_is_measured_within_what_is_possible() -> None:
    speed = measure_device(128)
    assert speed.flops > 1e8 and speed.memory_bandwidth > 1e8 and speed.kernel_seconds > 0
    for share in (speed.attention, speed.elementwise, *(s for _, s in speed.gemm + speed.grouped)):
        assert 0 < share <= 1
    assert [rows for rows, _ in speed.gemm] == [1, 4, 16, 64, 128]
    assert [rows for rows, _ in speed.grouped] == [1, 4, 8]


def test_the_best_of_several_runs_counts_and_the_first_does_not() -> None:
    waits = iter([0.2, 0.05, 0.02, 0.05, 0.05, 0.05])
    best = best_seconds(lambda: time.sleep(next(waits)), torch.device("cpu"), 5)
    assert 0.02 <= best < 0.05 and next(waits, None) is None


def test_what_is_short_runs_more_often() -> None:
    runs: list[int] = []
    best_seconds(lambda: runs.append(1), torch.device("cpu"))
    assert 6 < len(runs) <= 201


def test_measured_values_keep_their_units_and_grade() -> None:
    rows = [CollectiveSpeed("all_gather", n, 2e-5, b) for n, b in ((2, 1e11), (4, 2e11), (8, 1.5e11))]
    rows.append(CollectiveSpeed("all_to_all", 8, 3e-5, 1e11))
    found = cluster(document(SPEED, 8, rows))
    assert found.memory.value == 64 * 2**30 and found.bf16_flops.value == 4e14
    assert found.memory_bandwidth.value == 2e12 and found.host_link.value == 5e10
    assert found.kernel_seconds.value == pytest.approx(4e-6)
    assert found.measured_share("gemm", 4096) == 0.9 and found.measured_share("grouped", 1) == 0.5
    assert found.bf16_flops.grade == "measured" and found.failures.grade == "inferred"
    (host,) = found.networks
    assert host.bandwidth.value == 2e11 and host.latency.value == pytest.approx(2e-5)
    assert host.reach("all_gather", 2) == 0.5 and host.reach("all_gather", 8) == 0.75
    assert host.reach("all_to_all", 8) == 0.5


def test_ranks_of_a_cpu_share_it() -> None:
    values = document(replace(SPEED, host_link=None), 4, [])
    found = cluster(values)
    assert found.memory.value == 16 * 2**30 and found.bf16_flops.value == 1e14
    assert found.memory_bandwidth.value == 5e11 and found.compute_overlap.value == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="several ranks on the CPU")
def test_collectives_of_two_ranks_give_a_document() -> None:
    said: list[str] = []
    found = parse_cluster(document_of(calibrate(2, said.append, 128), "test"))
    assert found.ranks_per_host == 2 and len(said) == 2
    (host,) = found.networks
    assert host.bandwidth.value > 1e5 and host.latency.value > 0
    assert {name for name, _ in host.efficiency} == {"all_reduce", "all_gather", "all_to_all"}


def test_a_rank_that_fails_is_named() -> None:
    # More than any machine can address.
    with pytest.raises(RunError, match=r"rank \d.* ended early"):
        measure_collectives(1, 2**62)
