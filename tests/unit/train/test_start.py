"""An adapter that starts from another: grown to more targets, or refused tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.train.tiny_run import recipe_for, write_checkpoint
from trimtab.checkpoint.adapter import load_adapter
from trimtab.config.load import load_recipe
from trimtab.errors import AdapterError, ConfigError
from trimtab.train.job import assemble, open_data
from trimtab.train.loop import finetune
from trimtab.train.plan import plan_run
from trimtab.train.reporter import SilentReporter
from trimtab.train.run_dir import RunDirectory

SHORT = ("finetune.steps=2", "finetune.lora.target_modules=[q_proj]")


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    directory = tmp_path_factory.mktemp("first")
    finetune(recipe_for(directory, checkpoint, *SHORT), SilentReporter())
    return directory / "run" / "adapter"


def test_an_adapter_grows_to_more_targets_with_a_fresh_optimizer(
    tmp_path: Path, checkpoint: Path, first: Path
) -> None:
    recipe = recipe_for(
        tmp_path, checkpoint, f"finetune.lora.init_from={first}",
        "finetune.lora.target_modules=[q_proj, shared_experts]", "finetune.steps=1",
    )
    plan, notes = plan_run(recipe), Notes()
    stream = open_data(recipe, plan, notes)
    job = assemble(recipe, plan, RunDirectory(tmp_path / "run"), stream, notes)
    before = load_adapter(first, plan.arch).tensors
    for name, parameter in job.parameters.items():
        if name in before:
            assert torch.equal(parameter, before[name])
        elif name.endswith(".B"):
            assert not parameter.any()
    assert any(f"{len(before)} tensors" in line and "zero effect" in line for line in notes.lines)
    assert not job.optimizer.state
    assert finetune(recipe, SilentReporter()).passed


@pytest.mark.parametrize(
    ("override", "found"),
    [("finetune.lora.rank=8", r"q_proj\.lora\.A: \[4, 32\], this run has \[8, 32\]"),
     ("finetune.lora.alpha=2", r"q_proj: scaling 2, this run has 0\.5"),
     ("finetune.lora.target_modules=[k_proj]", r"q_proj\.lora\.B: not trained by this run")],
)  # fmt: skip
def test_what_does_not_fit_is_reported_tensor_by_tensor(
    tmp_path: Path, checkpoint: Path, first: Path, override: str, found: str
) -> None:
    recipe = recipe_for(tmp_path, checkpoint, *SHORT, f"finetune.lora.init_from={first}", override)
    with pytest.raises(AdapterError, match=rf"(?s)TT502.*init_from.*layers\.0\.self_attn\.{found}"):
        finetune(recipe, SilentReporter())
    assert not (tmp_path / "run").exists()


def test_another_base_is_refused(tmp_path: Path, first: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=1)
    recipe = recipe_for(tmp_path, other, *SHORT, f"finetune.lora.init_from={first}")
    with pytest.raises(AdapterError, match="trained on other weights"):
        finetune(recipe, SilentReporter())


def test_a_target_that_the_serving_engine_ignores_stops_the_run_before_it_begins(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe = recipe_for(tmp_path, checkpoint, "finetune.lora.serve_with=vllm")
    with pytest.raises(AdapterError, match=r"TT503.*vllm would ignore the adapter on kv_b_proj"):
        plan_run(recipe)
    fine = recipe_for(tmp_path, checkpoint, "finetune.lora.serve_with=vllm",
                      "finetune.lora.target_modules=[q_proj, latent]")
    plan = plan_run(fine)
    answers = {row.leaf: found.answer for row, found in zip(plan.table.rows, plan.serving, strict=True)}
    assert answers["q_proj"] == "yes" and "unproven" in answers.values()
    assert any("may not apply" in note for note in plan.table.notes)


def test_a_starting_adapter_must_exist_and_scaled_ranks_need_experts(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe_for(tmp_path, checkpoint)
    path = tmp_path / "recipe.yaml"
    with pytest.raises(ConfigError, match=r"TT107.*init_from"):
        load_recipe(path, ["finetune.lora.init_from=nowhere"])
    with pytest.raises(ConfigError, match=r"TT105.*moe_rank_scaling"):
        load_recipe(path, ["finetune.lora.moe_rank_scaling=true"])
