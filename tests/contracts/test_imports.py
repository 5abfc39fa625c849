"""Imports go down only, and what must start fast does not reach torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(root / "src")}
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"], cwd=root, env=env, capture_output=True,
        text=True, check=False, timeout=120,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False,
        timeout=60,
    )


def test_contracts_are_kept() -> None:
    run = lint(ROOT)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("arch/planted.py", "import torch\n", "known without torch"),
        ("ops/planted.py", "import transformers\n", "oracles, never the runtime"),
        ("ops/planted.py", "from trimtab.models import build\n", "Packages in layers"),
        ("planted.py", "", "Packages in layers"),
    ],
)
def test_a_planted_bad_import_breaks_its_contract(
    tmp_path: Path, file: str, line: str, contract: str
) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.json", "*.safetensors", "*.jsonl")
    shutil.copytree(ROOT / "src" / "trimtab", tmp_path / "src" / "trimtab", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "trimtab" / file).write_text(line)
    run = lint(tmp_path)
    assert run.returncode == 1
    broken = [row for row in run.stdout.splitlines() if row.strip().endswith("BROKEN")]
    assert any(contract in row for row in broken), run.stdout[-3000:]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["inspect", "--help"], ["inspect", "kimi-k3", "--json"],
     ["inspect", "k3.1-tiny"], ["inspect", "--list"],
     ["plan", "--model", "k3-tiny", "--cluster", "cpu", "--devices", "1", "--json"], ["explain", "TT101"]],
)
def test_quick_verbs_do_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from trimtab.__main__ import main\n"
        f"code = main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy or code else 0)\n"
    )
    run = python(code)
    assert run.returncode == 0, run.stderr


def test_help_and_version_answer_at_once() -> None:
    def seconds(flag: str) -> float:
        started = time.perf_counter()
        assert python(f"from trimtab.__main__ import main; main(['{flag}'])").returncode == 0
        return time.perf_counter() - started

    assert min(seconds("--help") for _ in range(3)) < 0.5
    assert min(seconds("--version") for _ in range(3)) < 0.5
