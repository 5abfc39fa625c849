"""finetune, evaluate and generate as typed: stdout, stderr and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.train.tiny_run import write_checkpoint, write_recipe
from trimtab.cli.main import run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    held_out = f"""\
evaluate:
  domain: [{{path: {tmp_path}/domain.jsonl, limit: 4, max_new_tokens: 4}}]
  general: [{{path: {tmp_path}/general.jsonl, limit: 4}}]
  gate: {{min_domain_gain: -1.0, max_general_loss: 1.0}}"""
    return write_recipe(tmp_path, checkpoint, output=tmp_path / "run", extra=held_out)


def test_the_job_from_dry_run_to_answer(
    tmp_path: Path, checkpoint: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--set", "finetune.steps=1"]
    assert run(["finetune", str(recipe), "--dry-run", *short]) == 0
    out = capsys.readouterr().out
    assert "q_proj" in out and "2 micro-batches of 2 x 64 tokens" in out and "1 steps" in out
    assert not (tmp_path / "run").exists()

    assert run(["finetune", str(recipe), "--json", *short]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 1
    assert "LoRA targets" in captured.err and "next: trimtab evaluate" in captured.err

    adapter = tmp_path / "run" / "adapter"
    report = tmp_path / "report.json"
    assert run(["evaluate", str(recipe), "--out", str(report)]) == 0
    out = capsys.readouterr().out
    assert "exact_match" in out and "bits_per_byte" in out and "pass" in out
    assert json.loads(report.read_text())["passed"] is True

    strict = ["--set", "evaluate.gate.min_domain_gain=2"]
    assert run(["evaluate", str(recipe), "--json", *strict]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False

    words = ["--prompt", "lemma: boxes", "--max-new-tokens", "4"]
    assert run(["generate", str(checkpoint), "--adapter", str(adapter), "--compare", *words]) == 0
    out = capsys.readouterr().out
    assert "base: " in out and "adapter: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "RECIPE"], "no such directory"),
        (["finetune", "nowhere.yaml"], "TT107"),
        (["finetune", "RECIPE", "--set", "finetune.lora.target_modules=[qproj]"], "did you mean"),
        (["finetune", "RECIPE", "--set", "finetune.lora.rnak=3"], "rank"),
        (["finetune", "RECIPE", "--set", "finetune.data.general.path=BROKEN"], "broken.jsonl:3"),
        (["generate", "MODEL"], "--prompt"),
        (["generate", "MODEL", "--prompt", "a", "--compare"], "needs --adapter"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, checkpoint: Path, recipe: Path, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n\n{"text": "cut\n{"text": "good"}\n')
    named = {"RECIPE": str(recipe), "MODEL": str(checkpoint)}
    line = [named.get(a, a).replace("BROKEN", str(broken)) for a in arguments]
    assert run(line) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert not (tmp_path / "run").exists()


def test_a_dry_run_needs_no_torch(recipe: Path) -> None:
    code = (
        "import sys; from trimtab.cli.main import run; "
        f"code = run(['finetune', {str(recipe)!r}, '--dry-run']); "
        "sys.exit(code or 9 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
