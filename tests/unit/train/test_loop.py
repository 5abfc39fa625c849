"""A whole run: killed, resumed, extended, refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.train.tiny_run import recipe_for, write_checkpoint
from trimtab.checkpoint.manifest import MANIFEST_NAME
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.config.load import load_recipe
from trimtab.errors import AdapterError, RunError
from trimtab.train.loop import finetune
from trimtab.train.metrics import read_metrics
from trimtab.train.plan import plan_run
from trimtab.train.reporter import SilentReporter, Update, plan_lines


class Killed(BaseException):
    """Stands for the end of the process."""


class KillAfter(SilentReporter):
    def __init__(self, step: int) -> None:
        self.step = step

    @contextmanager
    def progress(self, title: str) -> Iterator[Update]:
        def update(done: int, total: int, words: str = "") -> None:
            if title == "training" and done == self.step:
                raise Killed

        yield update


def losses(run: Path) -> list[tuple[object, object, object]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    result = finetune(recipe_for(directory, checkpoint), SilentReporter())
    assert result.passed and result.steps == 6
    return directory / "run"


def test_a_run_leaves_all_its_files_and_each_step_once(whole: Path) -> None:
    names = {p.name for p in whole.iterdir()}
    assert names == {"resolved.yaml", "run.json", "metrics.jsonl", "experts.jsonl", "checkpoints",
                     "report.html", "adapter"}
    assert {p.name for p in (whole / "checkpoints").iterdir()} == {"step-4", "step-6"}
    record = json.loads((whole / "run.json").read_text())
    assert record["status"] == "finished" and record["step"] == 6
    assert all(v["passed"] for v in record["verdicts"]) and len(record["verdicts"]) == 3
    rows = list(read_metrics(whole / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert set(rows[0]) >= {"lr", "grad_norm", "tokens_per_second", "peak_memory_gib",
                            "domain_share", "router_max_over_mean"}


def test_the_adapter_has_a_card_of_its_run(whole: Path) -> None:
    record = json.loads((whole / "run.json").read_text())
    card = (whole / "adapter" / "README.md").read_text()
    hashes = {digest for path, digest in record["inputs"].items() if path.endswith(".jsonl")}
    assert hashes and all(digest in card for digest in hashes)
    last = list(read_metrics(whole / "metrics.jsonl"))[-1]
    assert f"| loss | {last['loss']:.4g} nats per token |" in card and "| steps | 6 |" in card
    assert all(verdict["name"] in card for verdict in record["verdicts"][1:])
    assert f"torch {torch.__version__}" in card


def test_the_resolved_recipe_is_a_recipe_of_the_same_run(whole: Path) -> None:
    again = load_recipe(whole / "resolved.yaml")
    assert finetune(again, SilentReporter()).was_finished


@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_and_resumed_run_has_the_same_bits(
    tmp_path: Path, checkpoint: Path, whole: Path, step: int
) -> None:
    recipe = recipe_for(tmp_path, checkpoint)
    with pytest.raises(Killed):
        finetune(recipe, KillAfter(step))
    result = finetune(recipe, SilentReporter())
    assert result.resumed_from == (step - 1) // 2 * 2
    run = tmp_path / "run"
    assert losses(run) == losses(whole)
    ours, theirs = (load_file(r / "adapter" / "adapter_model.safetensors") for r in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.slow
def test_a_process_killed_outright_resumes_with_the_same_bits(
    tmp_path: Path, checkpoint: Path, whole: Path
) -> None:
    recipe_for(tmp_path, checkpoint)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "trimtab", "finetune", str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as job:
        deadline = time.monotonic() + 120
        state = run / "checkpoints" / "step-2"  # written in the background, some steps later
        while not (state / MANIFEST_NAME).exists() or (state / MARKER_NAME).exists():
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        job.kill()
    result = finetune(recipe_for(tmp_path, checkpoint), SilentReporter())
    assert result.resumed_from >= 2
    assert losses(run) == losses(whole)


def test_a_finished_run_can_be_made_longer_but_not_shorter(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.steps=2")
    finetune(recipe, SilentReporter())
    longer = finetune(recipe_for(tmp_path, checkpoint, "finetune.steps=3"), SilentReporter())
    assert (longer.resumed_from, longer.steps) == (2, 3)
    with pytest.raises(RunError, match=r"TT601.*finetune\.steps"):
        finetune(recipe_for(tmp_path, checkpoint, "finetune.steps=1"), SilentReporter())


def test_the_directory_of_another_run_is_refused(
    tmp_path: Path, checkpoint: Path, whole: Path
) -> None:
    other = recipe_for(tmp_path, checkpoint, f"output={whole}", "seed=3")
    with pytest.raises(RunError, match=r"(?s)TT601.*seed is 3, the run has 17"):
        finetune(other, SilentReporter())
    stranger = tmp_path / "run"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("keep me")
    with pytest.raises(RunError, match="TT601"):
        finetune(recipe_for(tmp_path, checkpoint), SilentReporter())
    assert [p.name for p in stranger.iterdir()] == ["thesis.tex"]


def test_a_run_on_changed_data_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.steps=1")
    finetune(recipe, SilentReporter())
    with (tmp_path / "domain.jsonl").open("a") as file:
        file.write('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(RunError, match=r"TT601.*domain\.jsonl"):
        finetune(recipe, SilentReporter())


def test_a_run_on_another_base_at_the_same_path_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    recipe = recipe_for(tmp_path, model, "finetune.steps=1")
    finetune(recipe, SilentReporter())
    shutil.rmtree(model)
    write_checkpoint(model, seed=1)
    with pytest.raises(RunError, match=r"TT601.*another .*model"):
        finetune(recipe, SilentReporter())


def test_a_wrong_target_leaves_nothing_behind(tmp_path: Path, checkpoint: Path) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.lora.target_modules=[q_porj]")
    with pytest.raises(AdapterError, match="TT501"):
        finetune(recipe, SilentReporter())
    assert not (tmp_path / "run").exists()


def test_epochs_count_passes_over_the_domain(tmp_path: Path, checkpoint: Path) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.steps=null", "finetune.epochs=0.5")
    assert 1 <= finetune(recipe, SilentReporter()).steps <= 8


def test_the_everyday_recipe_runs_as_it_stands(tmp_path: Path, checkpoint: Path) -> None:
    recipe_for(tmp_path, checkpoint)  # writes the data
    path = tmp_path / "everyday.yaml"
    path.write_text(f"""\
model: {{path: {checkpoint}}}
finetune:
  method: lora
  base_dtype: bf16
  lora:
    rank: 32
    alpha: 64
    dropout: 0.05
    target_modules: [q_proj, k_proj, v_proj, o_proj]
  optimizer: {{lr: 1.0e-4, scheduler: cosine}}
  data:
    domain: {{path: {tmp_path}/domain.jsonl}}
    general: {{path: {tmp_path}/general.jsonl}}
    domain_ratio: 0.8
    general_ratio: 0.2
output: {tmp_path}/everyday
""")
    # All else is as it stands; only the number of steps is cut for the test's sake.
    result = finetune(load_recipe(path, ["finetune.steps=1"]), SilentReporter())
    assert result.passed and result.steps == 1


class Said(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_names_records_that_it_leaves_out(tmp_path: Path, checkpoint: Path) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.steps=1", "finetune.data.on_error=skip")
    path = tmp_path / "domain.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:3], "{no json", *rows[3:]]) + "\n")
    heard = Said()
    finetune(recipe, heard)
    warned = [line for line in heard.lines if line.startswith("warning: ")]
    assert len(warned) == 1 and f"1 of 49 records left out: {path}:4 (not valid JSON" in warned[0]
    assert sum(line.startswith("data: domain: ") for line in heard.lines) == 1


def test_a_run_without_general_records_is_warned_about(tmp_path: Path, checkpoint: Path) -> None:
    both = recipe_for(tmp_path, checkpoint)
    assert plan_run(both).warnings == ()
    alone = recipe_for(tmp_path, checkpoint, "finetune.data.general=null",
                       "finetune.data.domain_ratio=1")
    (warning,) = plan_run(alone).warnings
    assert f"trimtab data replay {checkpoint}" in warning
    assert f"warning: {warning}" in plan_lines(plan_run(alone))
