"""A drill on a small run: kills of every kind, and a difference that it must find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.train.tiny_run import write_checkpoint, write_recipe
from trimtab.checkpoint.adapter import WEIGHTS_NAME
from trimtab.verify.drill import compare_runs, run_drill


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits_and_a_changed_one_does_not(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    recipe = write_recipe(tmp_path, model, output=tmp_path / "unused")
    out = tmp_path / "drill"
    report = run_drill(recipe, out, kills=3, seed=1, overrides=["checkpoint.every_steps=1"])
    assert sum(report.kills.values()) == 3 and report.starts == 4
    assert all(verdict.passed for verdict in report.verdicts)

    shutil.copytree(out / "whole", tmp_path / "changed")
    weights = tmp_path / "changed" / "adapter" / WEIGHTS_NAME
    tensors = load_file(weights)
    first = next(iter(tensors))
    tensors[first] = tensors[first] * 1.0000001
    save_file(tensors, weights)
    adapters, losses = compare_runs(tmp_path / "changed", out / "whole")
    assert not adapters.passed and losses.passed
