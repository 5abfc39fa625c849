"""Peak memory of fine-tuning runs, predicted before and measured: `python -m benchmarks.plan_memory`.

    python -m benchmarks.plan_memory --out benchmarks/results/plan_memory_cpu_202612.jsonl

Each case is two optimizer steps of `trimtab.train.step` in a fresh process, its peak resident
size less what was resident when the first began. The prediction, `trimtab.train.predicted.predict_memory`,
reads the architecture and the adapters' sizes only. Runs of 1 GiB and more have to agree within 10%.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from benchmarks.harness import MIB, Result
from benchmarks.lora_step import checkpoint, config_of
from trimtab.arch.adapter import Experts, LoRATarget, resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.load import load_model
from trimtab.config.recipe import BaseDtype
from trimtab.data.packing import IGNORED, Pack
from trimtab.models.context import Recompute
from trimtab.models.lora import inject, lora_parameters
from trimtab.plan.own_run import RunMemory
from trimtab.train.allocator import give_blocks_back
from trimtab.train.plan import BatchPlan
from trimtab.train.predicted import predict_memory
from trimtab.train.step import StepOptions, train_step

LIMIT = 0.10


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Args:
        model: preset, or `kimi-linear-224m`.
        packs: rows of a micro-batch.
        length: tokens of each.
        rank: of the adapters.
        recompute: what is computed again in the backward pass.
        targets: words for modules.
        experts: form of the adapters on routed experts.
        base: dtype of the frozen weights.
    """

    model: str
    packs: int
    length: int
    rank: int
    recompute: Recompute
    targets: tuple[str, ...] = ("attention",)
    experts: Experts = "none"
    base: BaseDtype = "fp32"

    def __str__(self) -> str:
        words = "+".join(self.targets) + ("" if self.experts == "none" else f"+experts {self.experts}")
        layers = {"none": "", "layer": ", layers recomputed", "selective": ", selective"}[self.recompute]
        return f"{self.model} {self.packs}x{self.length} r{self.rank} {words} {self.base}{layers}"


CASES = (
    Case("kimi-linear-224m", 1, 4096, 16, recompute="none"),
    Case("kimi-linear-224m", 2, 2048, 64, recompute="none", targets=("attention", "dense_ffn", "shared_experts")),
    Case("kimi-linear-224m", 4, 1024, 16, recompute="none", experts="per_expert", base="bf16"),
    Case("glm5-next-tiny", 4, 8192, 16, recompute="layer"),
    Case("glm5-next-tiny", 2, 8192, 8, recompute="none"),
    Case("k3.1-tiny", 1, 16384, 16, recompute="none"),
    Case("k3-tiny", 2, 32768, 8, recompute="layer"),
    Case("deepseek-v3.2-tiny", 8, 8192, 32, recompute="none"),
    Case("kimi-linear-tiny", 8, 4096, 16, recompute="none"),
    Case("kimi-linear-224m", 2, 4096, 16, recompute="selective"),
    Case("glm5-next-tiny", 8, 8192, 16, recompute="selective"),
)


def adapted(case: Case) -> tuple[ArchSpec, tuple[LoRATarget, ...]]:
    """Architecture and targets of a run."""
    arch = load_arch(config_of(case.model), case.model)
    return arch, resolve_targets(arch, target_modules=case.targets, rank=case.rank, alpha=32, dropout=0.0,
                                 experts=case.experts)


def predicted(case: Case) -> RunMemory:
    """What the planner says of a run."""
    return predict_memory(*adapted(case), batch(case), recompute=case.recompute)


def batch(case: Case) -> BatchPlan:
    """One micro-batch a step."""
    tokens = case.packs * case.length
    return BatchPlan(tokens, tokens, case.length)


def rows(case: Case) -> list[Pack]:
    """Packs of random bytes, every token but the last supervised."""
    generator = np.random.default_rng(0)
    found = []
    for index in range(case.packs):
        ids = generator.integers(0, 256, case.length)
        labels = np.append(ids[1:], IGNORED)
        bounds, valid = np.array([0, case.length], np.int32), np.ones(case.length, bool)
        found.append(Pack(index, ids, labels, bounds, valid, case.length - 1, {"x": case.length}, sources=("x",)))
    return found


def two_steps(folder: str, case: Case) -> Callable[[], object]:
    """The loaded model with adapters; returns what takes two steps."""
    give_blocks_back()
    model, _ = load_model(
        checkpoint(case.model, folder), base_dtype=case.base, compute_dtype=torch.float32, vision=False
    )
    inject(model, adapted(case)[1], seed=1)
    parameters = list(lora_parameters(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    options = StepOptions(batch(case), 0, 1.0, "error", case.recompute)
    packs = rows(case)
    return lambda: [
        train_step(model, packs, parameters, optimizer, step=step, options=options) for step in range(2)
    ]


def measure(folder: str, case: Case) -> Result:
    """Predicted over measured peak."""
    checkpoint(case.model, folder)
    said = predicted(case)
    peak = harness.peak_extra_bytes(two_steps, folder, case)
    error = said.peak / peak - 1
    details = {"predicted_mib": round(said.peak / MIB, 1), "measured_mib": round(peak / MIB, 1),
               "signed_error": round(error, 4),
               "lines_mib": {name: round(size / MIB, 1) for name, size in said.lines.items()}}
    return Result(str(case), "error of the predicted peak", abs(error), LIMIT if peak >= 2**30 else None,
                  at_least=False, details=details)


def main() -> int:
    """Parse the command line; 1 where a run of 1 GiB or more is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON lines file that rows are added to")
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="trimtab-plan-memory-")
    missed = 0
    try:
        for number in arguments.cases:
            result = measure(folder, CASES[number])
            missed += not result.passed
            print(result.as_line(), f"{result.details['predicted_mib']} of {result.details['measured_mib']} MiB",
                  flush=True)
            if arguments.out:
                harness.append_rows(arguments.out, "plan_memory", [result.as_row()])
    finally:
        shutil.rmtree(folder)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
