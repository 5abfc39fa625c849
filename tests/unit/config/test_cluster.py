"""Cluster documents: presets, units, grades, and errors that name their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config.cluster import cluster_names, load_cluster
from trimtab.config.cluster_document import GRADES
from trimtab.errors import ConfigError

WANTED = {
    "a100", "h100", "h200", "b200", "gb200-nvl72", "gb300-nvl72", "mi300x", "mi355x", "cpu",
    "ascend-a2", "ascend-a3", "ascend-950", "ascend-950-superpod",
}
SMALL = """
name: two
title: two hosts
device: card
grade: measured
packages_per_host: 4
memory_gib: 80
bf16_tflops: {value: 100, grade: vendor_claim}
memory_gb_s: 1000
networks:
  host: {bandwidth_gb_s: 200, latency_us: 5, efficiency: {all: [[2, 0.5], [8, 0.9]]}}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_every_wanted_preset_loads_and_grades_every_number() -> None:
    assert set(cluster_names()) >= WANTED
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert set(cluster.grades().values()) <= set(GRADES)


@pytest.mark.parametrize(
    ("name", "preset"),
    [("910c", "ascend-a3"), ("CloudMatrix384", "ascend-a3"), ("910B", "ascend-a2"),
     ("atlas-950-superpod", "ascend-950-superpod"), ("mi300", "mi300x"), ("gb200", "gb200-nvl72")],
)
def test_a_machine_by_another_name_is_recognised(name: str, preset: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_cluster(name)
    assert f"did you mean `{preset}`" in error.value.message


def test_the_planner_page_names_every_preset() -> None:
    page = (Path(__file__).parents[3] / "docs/planner.md").read_text()
    assert [name for name in cluster_names() if f"`{name}`" not in page] == []


def test_a_package_of_two_dies_is_two_ranks() -> None:
    assert load_cluster("ascend-a3").ranks_per_host == 16
    assert [net.ranks for net in load_cluster("ascend-a3").networks] == [16, 768, 0]


def test_numbers_have_the_document_grade_unless_they_say_otherwise(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, SMALL))
    assert cluster.memory.value == 80 * 2**30 and cluster.memory.grade == "measured"
    assert cluster.bf16_flops.value == 1e14 and cluster.bf16_flops.grade == "vendor_claim"
    assert cluster.grades()["host.bandwidth"] == "measured"
    # A default of the document format is nobody's measurement.
    assert cluster.gemm_efficiency.grade == "inferred"


def test_efficiency_is_a_line_over_the_logarithm_of_the_group(tmp_path: Path) -> None:
    net = load_cluster(written(tmp_path, SMALL)).networks[0]
    shares = [net.reach("all_to_all", n) for n in (2, 4, 8, 64)]
    assert shares == pytest.approx([0.5, 0.7, 0.9, 0.9])


def test_points_of_a_curve_have_grades_and_beyond_its_end_all_is_inferred(tmp_path: Path) -> None:
    text = SMALL.replace("[8, 0.9]]", "[8, 0.9, measured], [64, 0.5, vendor_claim]]").replace(
        "latency_us: 5,", "latency_us: 5, efficiency_grade: documented,")
    net = load_cluster(written(tmp_path, text)).networks[0]
    grades = [net.reach_grade("all_gather", n) for n in (2, 4, 8, 16, 64, 128)]
    assert grades == ["documented", "documented", "documented", "vendor_claim", "vendor_claim", "inferred"]
    # Without a curve the whole bandwidth is assumed.
    bare = load_cluster(written(tmp_path, SMALL.replace(", efficiency: {all: [[2, 0.5], [8, 0.9]]}", "")))
    assert bare.networks[0].reach_grade("send", 2) == "inferred"


def test_measured_products_are_a_line_over_the_logarithm_of_their_rows(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, SMALL + "gemm_by_rows: [[16, 0.2], [256, 0.6]]\n"))
    shares = [cluster.measured_share("gemm", n) for n in (1, 16, 64, 256, 9999)]
    assert shares == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])
    assert cluster.measured_share("grouped", 64) is None and cluster.measured_share("gemm", 0) is None


@pytest.mark.parametrize(
    ("change", "place", "rule"),
    [
        (("memory_gib: 80", "memory_gb: 80"), "memory_gb", "did you mean 'memory_gib'"),
        (("memory_gib: 80", "memory_gib: much"), ":7: memory_gib.value", "number"),
        (("grade: vendor_claim", "grade: rumour"), "bf16_tflops.grade", "measured"),
        (("[2, 0.5], [8, 0.9]", "[8, 0.5], [2, 0.9]"), "efficiency.all", "rising"),
        (("memory_gib: 80", "memory_gib: 80\ngemm_by_rows: [[8, 0.1], [4, 0.2]]"), "gemm_by_rows", "rising"),
        (("packages_per_host: 4", ""), "packages_per_host", "is required"),
        (("latency_us: 5,", "latency_us: 5, ranks: 3,"), "networks.host.ranks", "4 ranks"),
    ],
)
def test_a_fault_names_place_and_rule(
    tmp_path: Path, change: tuple[str, str], place: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_cluster(written(tmp_path, SMALL.replace(*change)))
    assert place in error.value.message and rule in error.value.message


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match="did you mean `h200`") as error:
        load_cluster("h20")
    assert error.value.code == "TT107" and "ascend-a3" in error.value.message
