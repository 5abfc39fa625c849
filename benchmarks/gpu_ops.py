"""CUDA kernels: correctness against float64 first, then times beside the PyTorch forms.

    sh benchmarks/gpu_ops.sh --out benchmarks/results/ops_gpu.jsonl
    TRITON_INTERPRET=1 python -m benchmarks.gpu_ops --device cpu      the checks alone, small, no GPU

Exit status 1 where a check misses its limit, 2 where this machine cannot run it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_cases as cases
from benchmarks.harness import Result, append_rows, interleave
from trimtab.ops.backends import build_ops
from trimtab.ops.registry import Implementation, OpCase
from trimtab.verify.tolerances import limit

KIND = "triton.float32"


def available(case: cases.Case, device: str) -> list[str]:
    """Kernels of the operator that can run here; under the interpreter those in Triton."""
    names, _ = cases.KERNELS[case.operator]
    if device == "cpu":
        return [name for name in names if name == "triton"]
    typical = {**build_ops().operators()[case.operator].typical, "mxfp4": 1}
    asked = OpCase(device, torch.float32, typical)
    reasons = {name: implementation(case, name).supports(asked) for name in names}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{case.name} [{name}] is left out: {reason}")
    return [name for name, reason in reasons.items() if reason is None]


def implementation(case: cases.Case, name: str) -> Implementation[..., Any]:
    """One implementation of a case's operator, whether or not it would be chosen here."""
    ways = build_ops().operators()[case.operator].implementations
    return next(way for way in ways if way.name == name)


def check(case: cases.Case, name: str, device: str) -> Result:
    """The worst relative error of outputs and gradients in float32."""
    found = case.run(implementation(case, name).run, torch.float32, device)
    exact = case.run(implementation(case, "reference").run, torch.float64, "cpu")
    worst = max(_relative_error(a, b) for a, b in zip(found, exact, strict=True))
    return Result(f"{case.name} [{name}]", "error against float64", worst, limit(KIND), at_least=False)


def times(case: cases.Case, names: list[str]) -> list[Result]:
    """Forward and backward in bfloat16, kernels and PyTorch form in turns."""
    _, peer = cases.KERNELS[case.operator]
    sides = {
        name: _synchronised(case.prepared(implementation(case, name).run, torch.bfloat16, "cuda"))
        for name in (*names, peer)
    }
    found = interleave(sides, 10, warmup=3)
    return [
        Result(
            f"{case.name} [{name}]", f"speed over {peer}", found[peer].median / found[name].median,
            details={"seconds": found[name].median, "peer_seconds": found[peer].median},
        )
        for name in names
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON lines file that rows are added to")
    args = parser.parse_args()
    if reason := _cannot_run(args.device):
        print(f"gpu_ops: {reason}", file=sys.stderr)
        return 2
    results = []
    for case in cases.small() + (cases.medium() if args.device == "cuda" else []):
        for name in available(case, args.device):
            results.append(check(case, name, args.device))
            print(results[-1].as_line(), flush=True)
    if args.device == "cuda" and all(result.passed for result in results):
        for case in cases.large():
            for result in times(case, available(case, "cuda")):
                results.append(result)
                print(result.as_line(), flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "interpreter"
        append_rows(args.out, "gpu_ops", [{**result.as_row(), "device": device} for result in results])
    return int(not all(result.passed for result in results))


def _relative_error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double().cpu(), exact.detach()
    return float((found - exact).abs().max() / exact.abs().max())


def _synchronised(step: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def _cannot_run(device: str) -> str | None:
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here; the checks alone run with TRITON_INTERPRET=1 and --device cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "--device cpu needs TRITON_INTERPRET=1"
    return None


if __name__ == "__main__":
    sys.exit(main())
