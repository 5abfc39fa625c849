"""Merge check: a merged checkpoint must compute what base plus adapter computes.

Knows: which limits of the tolerance table hold, and that a merge which fails them is closed to readers. Does not know:
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
from trimtab.checkpoint.base import require_base
from trimtab.checkpoint.codec import Progress
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import check_output, mark_unfinished
from trimtab.checkpoint.merge import Copied, OutputDtype, copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import ConfigError, DataError
from trimtab.models.context import ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import disabled
from trimtab.models.tape import ChoiceTape
from trimtab.verdict import Verdict
from trimtab.verify.dump import read_sequences
from trimtab.verify.logits import (
    probe_sequences,
    sequence_logits,
    token_errors,
    with_probe_image,
)
from trimtab.verify.tolerances import limit as tolerance

_Probe = tuple[list[int], ImageBatch | None]

_LIMITS = {torch.bfloat16: "merge.logits.bfloat16", torch.float32: "merge.logits.float32"}
_REQUANTISED = {form: f"merge.logits.{form}" for form in ("FP8", "INT4", "MXFP4")}
# What of an adapter's change quantising the sum again may lose. Where all of it is below half a step
# of the stored form the share is 1: the merged matrix is the base.
MAX_LOST = 0.5


@dataclass(frozen=True, slots=True)
class MergeChecks:
    """What a merge is held to.

    Args:
        logits: compare logits afterwards, which loads both models.
        sequences: token ids for that; a few fixed pseudo-random ones if not given.
        max_logits_error: limit of the relative error of a token's logits; by default that of the
            merged weights' dtype, or of the coarsest form that was quantised again.
        max_lost: limit of the error of quantising again, as a share of the adapter's change.
    """

    logits: bool = True
    sequences: Sequence[Sequence[int]] | None = None
    max_logits_error: float | None = None
    max_lost: float = MAX_LOST


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A merge as it was written: what it changed, with which error, and whether it computes the same."""

    num_targets: int
    copied: Copied
    verdicts: list[Verdict]


def merge_checked(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: OutputDtype = "native",
    checks: MergeChecks | None = None,
    accept_base: str | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Write base plus adapter as one checkpoint and compare what it computes.

    A merge that fails the check is marked unfinished, so that no other command reads it.

    Args:
        base: the base checkpoint.
        adapter: adapter directory.
        out: new directory.
        dtype: of the written weights, see `copy_checkpoint`.
        checks: see `MergeChecks`.
        accept_base: fingerprint of a base that may differ from the one the adapter names.
        progress: called with bytes done and in all while writing.

    Raises:
        AdapterError: the adapter does not fit, or TT505 if it was trained on another base.
        CheckpointError: TT309 if `out` holds something, or the base is damaged.
    """
    check_output(out)
    source = open_source(base)
    read = load_adapter(adapter, load_arch(source.config(), source.where))
    require_base(read, source, str(adapter), accept=accept_base)
    copied = copy_checkpoint(source, out, adapter=read, dtype=dtype, extra={"made_by": "merge"},
                             progress=progress)
    checks = checks or MergeChecks()
    verdicts = [
        Verdict.at_most("adapter's change lost in quantising again", error.share_of_change,
                        checks.max_lost, f"{error.kind} ({error.form})")
        for error in copied.errors if error.form in _REQUANTISED
    ]
    if checks.logits and all(verdict.passed for verdict in verdicts):
        limit = checks.max_logits_error
        if limit is None and verdicts:
            forms = {error.form for error in copied.errors}
            limit = max(tolerance(_REQUANTISED[form]) for form in forms & _REQUANTISED.keys())
        verdicts += check_merge(base, read, out, checks.sequences, limit)
    if not all(verdict.passed for verdict in verdicts):
        mark_unfinished(Path(out))
    return MergeReport(len(read.targets), copied, verdicts)


def read_prompts(path: str | Path, base: str | Path) -> list[list[int]]:
    """Token sequences to compare logits on.

    Args:
        path: a text file with a prompt per line, or `{"sequences": [[ids...], ...]}` as JSON.
        base: checkpoint whose tokenizer encodes text.

    Raises:
        DataError: TT401 where the file has no usable line, TT405 without a tokenizer.
        ConfigError: TT107 where it cannot be read.
    """
    if Path(path).suffix == ".json":
        return read_sequences(path)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("TT107", str(path), f"cannot be read: {error}") from error
    tokenizer = load_tokenizer(base)
    sequences = [tokenizer.encode(line) for line in lines if line.strip()]
    if not any(sequences):
        raise DataError("TT401", str(path), "has no line with text")
    return [ids for ids in sequences if ids]


def check_merge(
    base: str | Path,
    adapter: AdapterFile,
    merged: str | Path,
    sequences: Sequence[Sequence[int]] | None = None,
    max_error: float | None = None,
) -> list[Verdict]:
    """Compare logits of base plus adapter with those of the merged checkpoint.

    Args:
        base: the base checkpoint.
        adapter: read for it.
        merged: the merged checkpoint.
        sequences: token ids; a few fixed pseudo-random ones if not given. An image stands before
            each where the adapter changes the projector.
        max_error: limit of the median relative error of a token; by default that of the dtype.

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
    limit = max_error
    if limit is None:
        limit = tolerance(_LIMITS.get(model.embed.weight.dtype, _LIMITS[torch.float32]))
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
