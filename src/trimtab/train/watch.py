"""What a run writes down about itself, step by step.

Knows: metric rows, tokens per expert, operations, routing drift. Does not know: where rows go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.data.packing import Pack
from trimtab.train.batch import MicroBatch
from trimtab.train.drift import Drift, router_drift
from trimtab.train.flops import count_flops, matrix_speed
from trimtab.train.job import Job
from trimtab.train.memory import peak_memory_gib
from trimtab.train.metrics import truncate_after
from trimtab.train.router_load import RouterLoad
from trimtab.train.step import StepResult

_STRETCHES = 20  # rows of experts.jsonl that a run of usual length has at least


class Watch:
    """Turns what a step measured into rows.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._domain = {f.name for f in job.recipe.finetune.data.files if f.role == "domain"}
        self._flops: int | None = None
        self._speed = matrix_speed(job.model.embed.weight.device, job.model.compute_dtype)

    def count_operations(self, batch: MicroBatch) -> None:
        """Count the operations of one micro-batch, for the rate in every row."""
        job = self._job
        parts = job.plan.batch.accumulation
        counted = count_flops(job.model, batch, list(job.parameters.values()), job.options)
        self._flops = parts * counted

    def row(
        self, step: int, rate: float, result: StepResult, packs: Sequence[Pack], load: RouterLoad,
        elapsed: float,
    ) -> dict[str, object]:
        """One line of metrics.jsonl; `lr` is that of targets without a rate of their own."""
        tokens = self._job.plan.batch.tokens_per_step
        real = sum(int(pack.valid.sum()) for pack in packs)
        domain = sum(pack.tokens_by_source.get(name, 0) for pack in packs for name in self._domain)
        row: dict[str, object] = {
            "step": step + 1,
            "loss": result.loss,
            **{f"{role}_loss": loss for role, loss in result.loss_by_role.items()},
            "lr": rate,
            "grad_norm": result.grad_norm,
            "grad_norm_by_branch": result.grad_norm_by_branch,
            "tokens": tokens,
            "real_tokens": real,
            "supervised_tokens": result.supervised_tokens,
            "domain_share": domain / max(1, real),
            "tokens_per_second": round(tokens / elapsed, 1),
            "step_time_s": round(elapsed, 4),
            "peak_memory_gib": round(peak_memory_gib(), 4),
            "router_max_over_mean": load.max_over_mean(),
            "skipped": result.skipped,
        }
        if self._job.options.routing.capacity is not None:
            dropped = load.dropped()
            row |= {"dropped_tokens": sum(dropped.values()), "dropped_by_layer": dropped}
        balance = load.balance(real)
        if balance is not None:
            row["router_balance_loss"] = balance
        if self._flops is not None:
            per_second = self._flops / elapsed
            row["flops_per_second"] = round(per_second)
            row["mfu"] = round(per_second / self._speed, 4)
        return row

    def drift(self, probe: MicroBatch) -> Drift | None:
        """Routing with the adapter on and off."""
        return router_drift(self._job.model, probe, self._job.recipe.finetune.drift.tokens)


class ExpertLog:
    """experts.jsonl: tokens per expert and layer, summed over stretches of steps.

    Every saved state ends a stretch, so that a resumed run needs no counts from before.

    Args:
        path: the file; rows of later steps than `step` are dropped.
        step: steps done.
        every: steps of a stretch.
    """

    def __init__(self, path: Path, step: int, every: int) -> None:
        truncate_after(path, step)
        self._path, self._every = path, every
        self._load, self._since = RouterLoad(), step

    def add(self, step: int, load: RouterLoad, *, saves: bool) -> None:
        """Count a step, the `step`-th; write a row where a stretch ends."""
        self._load.add(load)
        if step % self._every and not saves:
            return
        row = {"step": step, "since": self._since, "tokens": self._load.histogram()}
        if row["tokens"]:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._load, self._since = RouterLoad(), step


def stretch(total_steps: int, save_every: int) -> int:
    """Steps between two rows of experts.jsonl: a divisor of the steps between two saves."""
    wanted = max(1, total_steps // _STRETCHES)
    return max(n for n in range(1, save_every + 1) if save_every % n == 0 and n <= wanted)


def words(row: Mapping[str, object]) -> str:
    """A row in a few words, for the bar."""
    found = [f"loss {row['loss']:.4f}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    if "validation_domain_loss" in row:
        found.append(f"validation {row['validation_domain_loss']:.4f}")
    return ", ".join(found)
