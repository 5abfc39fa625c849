"""Kernels for CUDA devices: right under Triton's interpreter, chosen by device alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_cases, gpu_ops
from trimtab.ops.backends import build_ops
from trimtab.ops.registry import OpCase
from trimtab.ops.triton import support

ROOT = Path(__file__).parents[3]
KERNELS = {operator: names for operator, (names, _) in gpu_cases.KERNELS.items()}


@pytest.fixture
def both_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: object())


def explained(operator: str, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, str | None]:
    """Reason of each implementation of an operator against a typical call."""
    found = build_ops().operators()[operator]
    shapes = {**found.typical, **({"mxfp4": 1} if operator == "experts" else {})}
    return {c.name: c.reason for c in found.explain(OpCase(device, dtype, shapes))}


@pytest.mark.slow  # an interpreter: seconds for what a GPU does in microseconds
def test_every_kernel_equals_its_equation_in_the_interpreter() -> None:
    # In a process of its own: the interpreter is chosen when triton is imported.
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_ops", "--device", "cpu"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(gpu_cases.small()) and all(line.endswith("ok") for line in lines)


def test_the_script_says_in_one_line_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_ops", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_ops.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no CUDA device" in said.err


@pytest.mark.usefixtures("both_installed")
@pytest.mark.parametrize("operator", KERNELS)
def test_kernels_run_on_cuda_and_never_on_a_cpu_that_could_import_them(operator: str) -> None:
    for name in KERNELS[operator]:
        assert explained(operator, "cuda")[name] is None
        assert explained(operator, "cpu", torch.float32)[name] == "runs on cuda, not on cpu"
        assert "float32" in explained(operator, "cuda", torch.float64)[name]


@pytest.mark.usefixtures("both_installed")
def test_kernels_of_fla_come_before_our_own() -> None:
    kda = build_ops().kda
    assert kda.choose(OpCase("cuda", torch.bfloat16, kda.typical)).name == "fla"


def test_a_missing_package_is_the_reason_and_something_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    for operator, names in KERNELS.items():
        reasons = explained(operator, "cuda")
        assert all("pip install" in (reasons[name] or "") for name in names)
        assert None in reasons.values()


@pytest.mark.usefixtures("both_installed")
def test_what_a_kernel_does_not_know_goes_to_another() -> None:
    ops = build_ops()
    plain = OpCase("cuda", torch.bfloat16, {"T": 4, "F": 8})  # no SiTU
    assert ops.activation.choose(plain).name == "blocks"
    dense = OpCase("cuda", torch.bfloat16, ops.experts.typical)  # no MXFP4
    assert ops.experts.choose(dense).name == "grouped"
    every_key = OpCase("cuda", torch.bfloat16, {**ops.attention.typical, "S": 0})
    assert ops.attention.choose(every_key).name == "tiles"


def test_kernels_are_not_imported_with_the_operators() -> None:
    kernels = "any(m.startswith('trimtab.ops.triton.') and 'support' not in m for m in sys.modules)"
    code = f"import sys, trimtab.ops.backends; sys.exit({kernels})"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
