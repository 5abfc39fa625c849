"""Peak memory of a run, known before any weight is read.

Knows: which implementation of an operator a run will use, and so what it keeps. Does not know: what
keeping costs (see `trimtab.plan.own_run`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.spec import ArchSpec, MLASpec
from trimtab.models.context import Recompute
from trimtab.ops.attention.cost import tiles_are_faster
from trimtab.ops.registry import OpCase
from trimtab.plan.own_run import RunMemory, RunShape, predict_run
from trimtab.train.plan import BatchPlan


def predict_memory(
    arch: ArchSpec, targets: Sequence[LoRATarget], batch: BatchPlan, *, recompute: Recompute
) -> RunMemory:
    """Peak bytes of a CPU run's steps above the process with model and adapters loaded.

    Within 10% of the measured peak for runs of 1 GiB and more (`benchmarks.plan_memory`); images
    are not counted, and packs are taken to hold one record.

    Args:
        arch: of the base.
        targets: adapters of the run.
        batch: how a global batch is cut.
        recompute: what is computed again in the backward pass.
    """
    length = batch.max_seq_len
    gathers = frozenset(
        index for index, layer in enumerate(arch.layers)
        if isinstance(layer.mixer, MLASpec) and gathers_latents(layer.mixer, batch.micro_batch_tokens, length)
    )
    dropout = any(target.dropout > 0 for target in targets)
    shape = RunShape(batch.micro_batch_tokens, length, recompute, gathers=gathers, dropout=dropout)
    return predict_run(arch, targets, shape)


def gathers_latents(mixer: MLASpec, tokens: int, length: int) -> bool:
    """Whether sparse attention fetches latents: where a query selects, and that is the faster way."""
    indexer = mixer.indexer
    if indexer is None or length <= indexer.top_k:
        return False
    sizes = {
        "T": tokens, "M": (length + 1) // 2, "H": mixer.num_heads, "K": mixer.qk_head_dim,
        "V": mixer.v_head_dim, "L": mixer.kv_lora_rank, "P": mixer.qk_rope_head_dim,
        "S": indexer.top_k,
    }
    return tiles_are_faster(OpCase("cpu", torch.float32, sizes)) is None
