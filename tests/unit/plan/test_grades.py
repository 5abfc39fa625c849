"""A plan is worth what the worst number it used is worth."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import Cluster, Graded, load_cluster
from trimtab.plan.grades import memory_grades, used_grades, worst_of
from trimtab.plan.job import Job
from trimtab.plan.placement import Degrees


@pytest.fixture(scope="module")
def k3() -> Outline:
    return load_outline(preset_config("kimi-k3"))


def all_measured(cluster: Cluster) -> Cluster:
    values = {
        field.name: replace(value, grade="measured")
        for field in fields(cluster)
        if isinstance(value := getattr(cluster, field.name), Graded)
    }
    return replace(cluster, **values)  # type: ignore[arg-type]


def test_one_rank_uses_no_network(k3: Outline) -> None:
    found = used_grades(load_cluster("h200"), k3, Job(), Degrees())
    assert not any("." in name for name in found) and "collective_seconds" not in found
    assert worst_of(found)[0] == "inferred"
    assert worst_of(used_grades(all_measured(load_cluster("h200")), k3, Job(), Degrees())) == (
        "measured", tuple(found))


def test_only_networks_that_a_group_crosses_count(k3: Outline) -> None:
    cluster = all_measured(load_cluster("ascend-950"))
    inside = used_grades(cluster, k3, Job(), Degrees(dp_shard=8, ep=8))
    assert {name.split(".")[0] for name in inside if "." in name} == {"host"}
    pod = used_grades(cluster, k3, Job(), Degrees(dp_shard=128, ep=128))
    assert {name.split(".")[0] for name in pod if "." in name} == {"host", "pod"}
    fabric = used_grades(cluster, k3, Job(), Degrees(dp_shard=2048, ep=128))
    assert "fabric.efficiency" in fabric


def test_precision_and_offload_use_numbers_of_their_own(k3: Outline) -> None:
    cluster = load_cluster("b200")
    plain = used_grades(cluster, k3, Job(), Degrees())
    fp8 = used_grades(cluster, k3, replace(Job(), precision="fp8", offload_optimizer=0.5), Degrees())
    assert set(fp8) - set(plain) == {"fp8_flops", "host_link"}


def test_whether_a_job_fits_hangs_on_memory_alone() -> None:
    assert worst_of(memory_grades(load_cluster("h200")))[1] == ("context",)


def test_a_document_of_measurements_gives_a_measured_plan(k3: Outline, tmp_path: Path) -> None:
    keys = ("memory_gib: 64", "context_gib: 1", "bf16_tflops: 100", "memory_gb_s: 1000",
            "gemm_efficiency: 0.6", "grouped_efficiency: 0.5", "attention_efficiency: 0.5",
            "memory_efficiency: 0.7", "kernel_us: 5", "host_us: 10", "collective_us: 10",
            "compute_overlap: 0.5", "packages_per_host: 8")
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(["name: c", "title: c", "device: d", "grade: measured", *keys, "networks:",
                               "  host: {bandwidth_gb_s: 100, latency_us: 5, efficiency: {all: [[8, 0.7]]}}"]))
    found = used_grades(load_cluster(str(path)), k3, Job(), Degrees(dp_shard=8, ep=8))
    assert worst_of(found)[0] == "measured" and len(found) > 12


def test_measured_products_replace_an_efficiency(k3: Outline) -> None:
    cluster = replace(load_cluster("h200"), gemm_by_rows=((1, 0.1), (4096, 0.7)))
    found = used_grades(cluster, k3, Job(), Degrees())
    assert "gemm_efficiency" not in found and "grouped_efficiency" in found
