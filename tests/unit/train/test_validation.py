"""Validation during a run: what is held out is not trained on, the best adapter is kept."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.train.tiny_run import recipe_for
from trimtab.checkpoint.adapter import attach_adapter, load_adapter
from trimtab.checkpoint.load import load_model
from trimtab.train.job import open_data
from trimtab.train.loop import finetune
from trimtab.train.metrics import read_metrics
from trimtab.train.plan import plan_run
from trimtab.train.reporter import SilentReporter
from trimtab.train.validation import Progress, validation_losses

ON = ("validate.every_steps=2", "validate.domain_holdout=0.2", "validate.general_holdout=0.2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    directory = tmp_path_factory.mktemp("validated")
    finetune(recipe_for(directory, checkpoint, *ON), SilentReporter())
    return directory


def test_losses_of_both_sides_stand_beside_the_steps(run: Path) -> None:
    rows = list(read_metrics(run / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    keys = ("validation_domain_loss", "validation_general_loss")
    assert [n for n, row in enumerate(rows) if all(k in row for k in keys)] == [0, 2, 4, 6]
    assert rows[6][keys[0]] < rows[0][keys[0]]  # type: ignore[operator]
    assert all("domain_loss" in row for row in rows[1:])


def test_nothing_held_out_is_trained_on(run: Path, checkpoint: Path) -> None:
    recipe = recipe_for(run, checkpoint, *ON)
    data = open_data(recipe, plan_run(recipe), SilentReporter())
    seen: set[tuple[int, ...]] = set()
    while any(source.epoch < 1 for source in data.stream._mixture.progress):
        seen |= documents(data.stream.next_pack())
    held = {d for pack in data.held_out for d in documents(pack)}
    assert held and seen and not held & seen


def documents(pack) -> set[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    real = [int(n) for n in pack.input_ids[: int(pack.valid.sum())]]
    bounds = [min(int(b), len(real)) for b in pack.cu_seqlens]
    return {tuple(real[a:b]) for a, b in pairwise(bounds)}


def test_the_kept_adapter_is_the_one_that_measured_best(run: Path, checkpoint: Path) -> None:
    rows = list(read_metrics(run / "run" / "metrics.jsonl"))
    progress = Progress.of(rows)
    recipe = recipe_for(run, checkpoint, *ON)
    plan = plan_run(recipe)
    data = open_data(recipe, plan, SilentReporter())
    model, arch = load_model(checkpoint, base_dtype="bf16", vision=plan.vision)
    best = load_adapter(run / "run" / "adapter-best", arch)
    assert best.manifest is not None and best.manifest.extra["steps"] == progress.best_step > 0
    attach_adapter(model, best)
    found = validation_losses(model, data.held_out, plan.batch)
    assert found["validation_domain_loss"] == pytest.approx(progress.best, rel=1e-6)


def test_a_run_ends_when_validation_no_longer_improves(tmp_path: Path, checkpoint: Path) -> None:
    recipe = recipe_for(tmp_path, checkpoint, *ON, "validate.every_steps=1",
                        "validate.stop_after=2", "finetune.optimizer.lr=3.0",
                        "finetune.optimizer.warmup_ratio=0", "finetune.steps=40")
    result = finetune(recipe, SilentReporter())
    assert 2 <= result.steps < 40 and not result.stopped
    assert (tmp_path / "run" / "checkpoints" / f"step-{result.steps}").is_dir()
    again = finetune(recipe, SilentReporter())
    assert again.was_finished


def test_progress_counts_validations_without_improvement() -> None:
    progress = Progress()
    assert [progress.add(n, loss) for n, loss in enumerate((3.0, 2.0, 2.5, 2.0))] == [
        True, True, False, False,
    ]
    assert (progress.best, progress.best_step, progress.worse) == (2.0, 1, 2)
    assert Progress.of([{"step": 1, "loss": 1.0}]) == Progress()
