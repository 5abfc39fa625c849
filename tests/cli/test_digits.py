"""The digits recipe, run as it stands: images are named in words as exactly as its gate asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from trimtab.cli.main import run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute and a half on an idle machine
def test_the_recipe_reaches_the_accuracy_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # where the recipe's paths start
    command = ["recipes/digits.yaml", "--set", f"output={tmp_path / 'run'}", "--json"]
    assert run(["finetune", *command]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["passed"]
    assert "image features: float32" in captured.err and "placeholders = image tokens" in captured.err
    with safe_open(tmp_path / "run/adapter/adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert any("mm_projector" in name for name in names)
    assert not any("vision_tower" in name for name in names), "the tower is frozen"

    assert run(["evaluate", *command]) == 0, "the gate failed"
    report = json.loads(capsys.readouterr().out)
    named, read, _ = report["sets"]
    assert named["before"]["value"] == 0.0 and named["after"]["value"] >= 0.85
    assert named["num_records"] == read["num_records"] == 300
