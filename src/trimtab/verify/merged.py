"""Merge check: a merged checkpoint must compute what base plus adapter computes.

Knows: the limits and why. Does not know: how merging is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimtab.checkpoint.adapter import AdapterFile, attach_adapter
from trimtab.checkpoint.load import BaseDtype, load_model
from trimtab.models.lora import disabled
from trimtab.verdict import Verdict
from trimtab.verify.logits import probe_sequences, sequence_logits, token_errors

# Rounding a merged matrix once to bf16 moves each weight by up to 2^-9 of itself; float32 keeps
# the sum. The median over tokens is compared, so that a token whose router flips between two
# near-equal experts does not decide.
LIMITS: dict[torch.dtype, float] = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


def check_merge(
    base: str | Path,
    adapter: AdapterFile,
    merged: str | Path,
    sequences: Sequence[Sequence[int]] | None = None,
) -> list[Verdict]:
    """Compare logits of base plus adapter with those of the merged checkpoint.

    Args:
        base: the base checkpoint.
        adapter: read for it.
        merged: the merged checkpoint.
        sequences: token ids; a few fixed pseudo-random ones if not given.

    Returns:
        Two verdicts: the error itself, and the error against the adapter's own effect, which
        shows a merge that was skipped or done twice even where the effect is small.
    """
    adapted, plain = _adapter_logits(base, adapter, sequences)
    model, arch = load_model(merged, base_dtype="native")
    limit = LIMITS.get(model.embed.weight.dtype, LIMITS[torch.float32])
    found = torch.cat([
        sequence_logits(model, ids) for ids in sequences or probe_sequences(arch.vocab_size)
    ])
    error = float(token_errors(found, adapted).median())
    effect = float(token_errors(plain, adapted).median())
    verdicts = [Verdict.at_most("merged logits against base + adapter", error, limit)]
    if effect > 0:
        share = error / effect
        # Below the rounding of the weights themselves the share says nothing.
        allowed = 0.5 if effect > limit else float("inf")
        verdicts.append(
            Verdict.at_most("merge error as a share of the adapter's effect", share, allowed)
        )
    return verdicts


def _adapter_logits(
    base: str | Path, adapter: AdapterFile, sequences: Sequence[Sequence[int]] | None
) -> tuple[Tensor, Tensor]:
    keep: BaseDtype = "native"
    model, arch = load_model(base, base_dtype=keep)
    attach_adapter(model, adapter)
    chosen = sequences or probe_sequences(arch.vocab_size)
    adapted = torch.cat([sequence_logits(model, ids) for ids in chosen])
    with disabled(model):
        plain = torch.cat([sequence_logits(model, ids) for ids in chosen])
    return adapted, plain
