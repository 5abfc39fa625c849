"""Router drift, counted operations, tokens per expert, trackers."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.train.test_step import adapted, packs
from tests.unit.train.tiny_run import recipe_for
from trimtab.errors import RunError
from trimtab.models.context import Routing
from trimtab.models.lora import lora_parameters
from trimtab.train import trackers
from trimtab.train.batch import micro_batches
from trimtab.train.drift import router_drift
from trimtab.train.flops import count_flops
from trimtab.train.loop import finetune
from trimtab.train.metrics import Row, read_metrics
from trimtab.train.plan import BatchPlan
from trimtab.train.reporter import SilentReporter
from trimtab.train.router_load import RouterLoad
from trimtab.train.step import StepOptions, clip_gradients, loss_sums, norm_by_branch
from trimtab.train.trackers import numbers, open_trackers
from trimtab.train.watch import ExpertLog, stretch

PLAN = BatchPlan(64, 64, 64)


def test_an_adapter_without_effect_does_not_drift_and_one_with_effect_does(
    tmp_path: Path, checkpoint: Path
) -> None:
    (probe,) = micro_batches(packs(tmp_path, checkpoint, 1), PLAN)
    still = router_drift(adapted(checkpoint, nonzero=False), probe, 32)
    assert still is not None and set(still.kl.values()) == {0.0} and set(still.overlap.values()) == {1.0}
    model = adapted(checkpoint)
    with torch.no_grad():
        for name, parameter in lora_parameters(model).items():
            parameter.mul_(20.0 if name.endswith("B") else 1.0)
    moved = router_drift(model, probe, 32)
    assert moved is not None and moved.worst[1] > 1e-3
    assert min(moved.overlap.values()) < 1.0 and all(kl >= 0 for kl in moved.kl.values())
    assert router_drift(model, probe, 32) == moved, "measuring changes nothing"


def test_operations_are_counted_with_recomputation_and_leave_no_gradient(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = adapted(checkpoint)
    (batch,) = micro_batches(packs(tmp_path, checkpoint, 1), PLAN)
    parameters = list(lora_parameters(model).values())
    counts = [
        count_flops(model, batch, parameters, StepOptions(PLAN, 17, None, "error", recompute))
        for recompute in ("none", "layer", "selective")
    ]
    assert all(p.grad is None for p in parameters)
    for recompute, counted in zip(("none", "layer"), counts, strict=False):
        options = StepOptions(PLAN, 17, None, "error", recompute)
        with FlopCounterMode(display=False) as theirs:
            sums = loss_sums(model, batch, 0, options, None).by_role.values()
            torch.stack([total for total, _ in sums]).sum().backward()
        assert theirs.get_total_flops() == counted
    # Every token meets the output head and its gradient; recomputation repeats the layers.
    head = 2 * 2 * int((batch.labels >= 0).sum()) * model.head_weight.numel()
    assert head < counts[0] < counts[2] < counts[1] < 2 * counts[0]


def test_gradient_norms_of_branches_add_up_to_the_global_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = adapted(checkpoint)
    named = lora_parameters(model)
    (batch,) = micro_batches(packs(tmp_path, checkpoint, 1), PLAN)
    options = StepOptions(PLAN, 17, None, "error", "none")
    sum(total for total, _ in loss_sums(model, batch, 0, options, None).by_role.values()).backward()  # type: ignore[union-attr]
    branches = ["kda" if ".0." in name else "rest" for name in named]
    norms = norm_by_branch(list(named.values()), branches)
    total = clip_gradients(named.values(), None)
    assert set(norms) == {"kda", "rest"}
    assert sum(n * n for n in norms.values()) ** 0.5 == pytest.approx(total, rel=1e-12)


def test_losses_of_both_sources_add_up(tmp_path: Path, checkpoint: Path) -> None:
    model = adapted(checkpoint)
    options = StepOptions(BatchPlan(256, 256, 64), 17, None, "error", "none")
    (batch,) = micro_batches(packs(tmp_path, checkpoint, 4), options.plan)
    found = loss_sums(model, batch, 0, options, None).by_role
    assert set(found) == {"domain", "general"}
    assert sum(count for _, count in found.values()) == int((batch.labels >= 0).sum())
    assert all(total.item() > 0 for total, _ in found.values())


def routed(counts: list[int]) -> Routing:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).unsqueeze(1)
    scores, bias = torch.rand(len(ids), len(counts)), torch.zeros(len(counts))
    return Routing(1, scores, bias, ids, None, None)


def test_experts_are_summed_over_stretches_that_end_with_every_save(tmp_path: Path) -> None:
    assert [stretch(200, 50), stretch(6, 2), stretch(1000, 7), stretch(40, 3)] == [10, 1, 7, 1]
    log = ExpertLog(tmp_path / "experts.jsonl", 0, 3)
    for step in range(1, 6):
        load = RouterLoad()
        load.record(routed([step, 1]))
        log.add(step, load, saves=step == 4)
    rows = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert [(r["since"], r["step"], r["tokens"]["1"]) for r in rows] == [
        (0, 3, [6, 3]), (3, 4, [4, 1]),
    ]
    ExpertLog(tmp_path / "experts.jsonl", 3, 3)
    assert len(list(read_metrics(tmp_path / "experts.jsonl"))) == 1


ROW = {"step": 1, "loss": 2.5, "skipped": False, "router_kl": {"1": 0.25}, "note": "text"}


def test_numbers_of_a_row_are_flattened() -> None:
    assert dict(numbers(ROW)) == {"loss": 2.5, "skipped": 0.0, "router_kl/1": 0.25}


def test_tensorboard_gets_every_number_and_a_resume_hides_what_came_after(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, loss in ((0, 1.0), (1, 9.0)):
        with open_trackers(["jsonl", "tensorboard"], tmp_path, tmp_path / "m.jsonl", start, print) as out:
            for step in range(start + 1, 4):
                out.write({**ROW, "step": step, "loss": loss})
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert {"loss", "router_kl/1"} <= set(found.Tags()["scalars"])
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 1.0), (2, 9.0), (3, 9.0)]
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3]


def test_mlflow_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    for start in (0, 1):
        with open_trackers(["mlflow"], tmp_path, tmp_path / "m.jsonl", start, print) as out:
            out.write({**ROW, "step": start + 1})
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("trimtab").experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics["router_kl/1"] == 0.25
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 2]


@pytest.mark.parametrize("package", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package or name.startswith(f"torch.utils.{package}"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with (
        pytest.raises(RunError, match=rf"TT604.*{package}"),
        open_trackers([package], tmp_path, tmp_path / "m.jsonl", 0, print),
    ):
        pass
    assert not (tmp_path / "m.jsonl").exists()


def test_a_server_that_goes_away_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    class Flaky:
        def write(self, row: Row) -> None:
            calls.append(int(str(row["step"])))
            if len(calls) == 2:
                raise ConnectionError("https://me:hunter2@host/x?key=secret is gone\nand more")

        def close(self) -> None:
            calls.append(-1)

    monkeypatch.setattr(trackers, "MlflowTracker", lambda root: Flaky())
    said: list[str] = []
    with open_trackers(["mlflow"], tmp_path, tmp_path / "m.jsonl", 0, said.append) as out:
        for step in (1, 2, 3):
            out.write({**ROW, "step": step})
    assert calls == [1, 2]
    assert said == ["warning: mlflow gets no more rows of this run: ConnectionError: https://host/x "
                    "is gone; metrics.jsonl has all of them"]
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3]


def test_a_tracker_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Path) -> None:
        raise OSError("no such server")

    monkeypatch.setattr(trackers, "MlflowTracker", refuse)
    with (
        pytest.raises(RunError, match=r"TT607.*track \(mlflow\).*no such server"),
        open_trackers(["mlflow"], tmp_path, tmp_path / "m.jsonl", 0, print),
    ):
        pass


def test_a_missing_package_ends_a_run_before_weights_are_read(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    recipe = recipe_for(tmp_path, checkpoint, "track=[mlflow]")
    with pytest.raises(RunError, match=r"TT604.*mlflow"):
        finetune(recipe, SilentReporter())
    assert not (tmp_path / "run").exists()
