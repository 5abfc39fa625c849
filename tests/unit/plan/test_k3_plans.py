"""Plans of the real K3: exact model state, published layouts, Ascend super-nodes, what limits each."""

from __future__ import annotations

import json

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.presets import preset_config
from trimtab.cli.main import run
from trimtab.config.cluster import load_cluster
from trimtab.plan.job import Job, choose_adapters
from trimtab.plan.memory import Layout, MemoryModel
from trimtab.plan.placement import Degrees
from trimtab.plan.stages import split

PLAN = ["plan", "--model", "kimi-k3", "--base-dtype", "native", "--json"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = run([*PLAN, *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("ep", [1, 8, 16, 64, 896])
def test_experts_divide_to_the_byte(ep: int) -> None:
    outline = load_outline(preset_config("kimi-k3"))
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"))
    model = MemoryModel(outline, job, load_cluster("h200"))
    layout = Layout(Degrees(dp_shard=ep, ep=ep), split(outline, 1), "dedup", resident=True)
    experts = sum(n for name, n in outline.stored_bytes.items() if ".mlp.experts." in name)
    rest = sum(outline.stored_bytes.values()) - experts
    assert model.worst(layout).lines["base_weights"] == rest + experts / ep
    assert experts % 896 == 0


def test_sixty_four_dies_of_64_gib_hold_the_packed_base(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = planned(capsys, "--cluster", "ascend-a3", "--devices", "64")
    assert code == 0 and plan["placement"] == "64 ranks = 32 packages = 4 hosts, 64 GiB each"
    assert str(plan["binding_limit"]).startswith("time: grouped products of the experts")
    best = plan["layouts"][0]  # type: ignore[index]
    assert best["memory_per_rank_bytes"]["total"] < plan["memory_limit_bytes"]
    code, plan = planned(capsys, "--cluster", "ascend-a3", "--devices", "64", "--base-dtype", "bf16")
    assert code == 3 and "base weights" in str(plan["binding_limit"])
    assert "native" in json.dumps(plan["changes"])


def test_two_hosts_of_eight_h200(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = planned(capsys, "--cluster", "h200", "--hosts", "2")
    assert code == 0 and plan["placement"] == "16 ranks = 2 hosts, 139.8 GiB each"
    assert str(plan["binding_limit"]).startswith("time: ")
    code, plan = planned(capsys, "--cluster", "h200", "--hosts", "1")
    assert code == 3 and str(plan["binding_limit"]).startswith("memory: ")


@pytest.mark.parametrize("devices", [128, 512, 8192])
def test_super_node_at_three_lengths(capsys: pytest.CaptureFixture[str], devices: int) -> None:
    shares = []
    for length in (8192, 131072, 1048576):
        code, plan = planned(capsys, "--cluster", "ascend-950-superpod", "--devices", str(devices),
                             "--seq-len", str(length))
        assert code == 0 and plan["devices"] == devices and plan["worst_input_grade"] == "inferred"
        best = plan["layouts"][0]  # type: ignore[index]
        degrees = [best[k] for k in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
        product = 1
        for degree in degrees:
            product *= degree
        assert product == devices
        parts = best["step_parts_s"]
        assert sum(parts.values()) == pytest.approx(best["step_time_s"])
        shares.append(parts["attention"] / (best["step_time_s"] - parts["pipeline_bubble"]))
    # The 23 softmax layers take over as sequences grow.
    assert shares[0] < 0.1 < shares[1] < 0.5 < shares[2]
