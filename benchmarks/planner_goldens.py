"""Rows of Megatron-LM's functional tests, as questions to the planner.

Knows: the arguments of its test cases (`planner_goldens.json`; the source is the model_config.yaml
beside each golden file) and the defaults of its command line. A table names only layout, batch and
reading of such a row, everything else follows from the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trimtab.plan.job import MEGATRON, Job, Recompute, Stack
from trimtab.plan.memory import OUTSIDE, StageMemory
from trimtab.plan.placement import Degrees
from trimtab.plan.planner import BANDS

CASES = Path(__file__).with_name("planner_goldens.json")
_MARK = "mcore-test:"
# One workspace of the GEMM library: 8 blocks of 4 MiB, as these tests set it. There are three of
# them between steps, which the readings after a step confirm, and where products are grouped four
# more, one a stream.
_WORKSPACE = 32 * 2**20
_VOCABULARY_MULTIPLE = 128  # beside tp


@dataclass(frozen=True, slots=True)
class Golden:
    """Arguments of one test case.

    Args:
        config: the model as a reader takes it, its vocabulary not padded.
        flags: `sharded_optimizer` or `sharded_parameters`, `plain_attention`, `grouped` products of
            experts, `dropout`, `sequence_parallel`, `fp16` in place of bf16, `fp8` products,
            `recompute` of every layer, `no_mask` among the data.
        values: numbers: etp, chunks, chunk_group, instances of the sharded optimizer, devices, steps,
            vocabulary_multiple; and the name of the optimizer.
    """

    config: Mapping[str, Any]
    flags: frozenset[str]
    values: Mapping[str, Any]


def golden_of(row: Mapping[str, str]) -> Golden | None:
    """The test case that a row names, None where it names none or one that is not described."""
    if not row["model"].startswith(_MARK):
        return None
    # These two name another order of ranks and another size of machine, which the columns have.
    name = row["model"].removeprefix(_MARK).removesuffix("_1node").removesuffix("_dp_last")
    found = _described()["cases"].get(name)
    if found is None:
        return None
    config = _described()["models"][found["model"]] | found.get("change", {})
    return Golden(config, frozenset(found["flags"]), found)


@lru_cache(maxsize=1)
def _described() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(CASES.read_text(encoding="utf-8"))
    return loaded


def padded_config(golden: Golden, tp: int) -> dict[str, object]:
    """The model with its vocabulary padded so that tp divides it."""
    multiple = golden.values.get("vocabulary_multiple", _VOCABULARY_MULTIPLE) * tp
    size = -(-golden.config["vocab_size"] // multiple) * multiple
    return {**golden.config, "vocab_size": size}


def golden_degrees(golden: Golden, degrees: Degrees) -> Degrees:
    """Experts are divided by tp, too, where nothing else is asked for."""
    instances = golden.values.get("instances", 1)
    return replace(
        degrees, etp=golden.values.get("etp", degrees.tp),
        dp_shard=degrees.dp_shard // instances, dp_replicate=instances,
    )


def golden_job(golden: Golden, job: Job) -> Job:
    """The job of a row with what the arguments of its test case say."""
    flags, values = golden.flags, golden.values
    stack = _stack(flags)
    if "no_mask" not in flags:
        # The loader puts a mask of one byte per query and key beside the tokens.
        mask = job.micro_batch * job.seq_len**2
        stack = replace(stack, workspace=stack.workspace + mask)
    return replace(
        job, stack=stack, routing=BANDS["typical"], dropout="dropout" in flags,
        recompute=Recompute("all") if "recompute" in flags else job.recompute,
        attention="plain" if "plain_attention" in flags else "fused",
        precision="fp8" if "fp8" in flags else "bf16", chunks=values.get("chunks", 1),
        chunk_group=values.get("chunk_group", 0), optimizer=values.get("optimizer", "adam"),
    )


def of_only_step(memory: StageMemory) -> StageMemory:
    """The peak of a run of one step: moments are made when its activations are gone."""
    forward = replace(memory, lines=memory.lines | {"moments": 0.0})
    return max(forward, between_steps(memory), key=lambda one: one.allocated)


def between_steps(memory: StageMemory) -> StageMemory:
    """What is allocated while no micro-batch is at work."""
    kept = ("base_weights", "adapters", "gradients", "moments", "masters", "workspace", *OUTSIDE)
    return replace(memory, lines={k: v if k in kept else 0.0 for k, v in memory.lines.items()})


def _stack(flags: frozenset[str]) -> Stack:
    """Gradients in fp32 (beside fp16, in fp16), added by an operation of their own; loss in fp32."""
    workspaces = 3 + 4 * ("grouped" in flags)
    stack = replace(
        MEGATRON, shards="none", weight_grad_buffer=False, loss_in_place=False,
        workspace=workspaces * _WORKSPACE,
        grad_bytes=2 if "fp16" in flags else 4, sequence_parallel="sequence_parallel" in flags,
    )
    if "sharded_parameters" in flags:
        return replace(stack, shards="all")
    return replace(stack, shards="optimizer") if "sharded_optimizer" in flags else stack
