"""Merge check: a merged checkpoint must compute what base plus adapter computes.

Knows: the limits and why, and that a merge which fails them is closed to readers. Does not know:
how merging is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.checkpoint.adapter import AdapterFile, attach_adapter, load_adapter
from trimtab.checkpoint.codec import Progress
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import check_output, mark_unfinished
from trimtab.checkpoint.merge import OutputDtype, copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.models.context import ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import disabled
from trimtab.models.tape import ChoiceTape
from trimtab.verdict import Verdict
from trimtab.verify.logits import (
    probe_sequences,
    sequence_logits,
    token_errors,
    with_probe_image,
)

_Probe = tuple[list[int], ImageBatch | None]

# Rounding a merged matrix once to bf16 moves each weight by up to 2^-9 of itself, which reaches
# 1e-2 in the logits of random models of 8 layers; float32 keeps the sum. Routing and key selection
# of base + adapter are forced on the merged model: a token that flips between two near-equal
# experts would otherwise decide.
LIMITS: dict[torch.dtype, float] = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A merge as it was written: how many modules it changed, and whether it computes the same."""

    num_targets: int
    verdicts: list[Verdict]


def merge_checked(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: OutputDtype = "native",
    check: bool = True,
    progress: Progress | None = None,
) -> MergeReport:
    """Write base plus adapter as one checkpoint and compare what it computes.

    A merge that fails the check is marked unfinished, so that no other command reads it.

    Args:
        base: the base checkpoint.
        adapter: adapter directory.
        out: new directory.
        dtype: of the written weights, see `copy_checkpoint`.
        check: compare logits afterwards, which loads both models.
        progress: called with bytes done and in all while writing.

    Raises:
        AdapterError: the adapter does not fit.
        CheckpointError: TT309 if `out` holds something, or the base is damaged.
    """
    check_output(out)
    source = open_source(base)
    read = load_adapter(adapter, load_arch(source.config(), source.where))
    copy_checkpoint(source, out, adapter=read, dtype=dtype, extra={"made_by": "merge"},
                    progress=progress)
    verdicts = check_merge(base, read, out) if check else []
    if not all(verdict.passed for verdict in verdicts):
        mark_unfinished(Path(out))
    return MergeReport(len(read.targets), verdicts)


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
        sequences: token ids; a few fixed pseudo-random ones if not given. An image stands before
            each where the adapter changes the projector.

    Returns:
        Two verdicts: the error itself, and the error against the adapter's own effect, which
        shows a merge that was skipped or done twice even where the effect is small.
    """
    model, arch = load_model(base, base_dtype="native")
    attach_adapter(model, adapter)
    probes: list[_Probe] = [(list(ids), None) for ids in sequences or probe_sequences(arch.vocab_size)]
    if any(name.startswith("projector.") for name in adapter.tensors):
        # Text alone would not see a projector that was merged wrongly; most tokens are the image's,
        # so that the median is theirs.
        probes = [with_probe_image(arch, ids) for ids, _ in probes]
    tapes = [ChoiceTape() for _ in probes]
    adapted = _logits(model, probes, tapes)
    with disabled(model):
        plain = _logits(model, probes, [_forced(tape) for tape in tapes])
    del model
    model, _ = load_model(merged, base_dtype="native")
    found = _logits(model, probes, [_forced(tape) for tape in tapes])
    limit = LIMITS.get(model.embed.weight.dtype, LIMITS[torch.float32])
    error = float(token_errors(found, adapted).median())
    effect = float(token_errors(plain, adapted).median())
    verdicts = [Verdict.at_most("merged logits against base + adapter", error, limit)]
    if effect > 0:
        name, share = "merge error as a share of the adapter's effect", error / effect
        # An effect below the rounding of the weights themselves is reported, not judged.
        judged = effect > limit
        verdicts.append(Verdict.at_most(name, share, 0.5) if judged
                        else Verdict(name, share, None, True))
    return verdicts


def _logits(
    model: CausalLM, probes: Sequence[_Probe], tapes: Sequence[ChoiceTape]
) -> Tensor:
    pairs = zip(probes, tapes, strict=True)
    return torch.cat([sequence_logits(model, ids, tape, images) for (ids, images), tape in pairs])


def _forced(tape: ChoiceTape) -> ChoiceTape:
    return ChoiceTape("force", tape.choices)
