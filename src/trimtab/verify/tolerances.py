"""The tolerance table: every limit on a numeric difference, with the noise measured beside it.

Errors are relative to the largest magnitude of the tensor compared. `noise` is what the same
comparison measures here (worst over its cases); a limit leaves room for other machines' summation
orders and is never raised to make a check pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A limit for one kind of comparison.

    Args:
        limit: largest relative error allowed.
        noise: relative error measured.
    """

    limit: float
    noise: float


TOLERANCES: dict[str, Tolerance] = {
    # Whole models against transformers or the naive float64 model.
    "model.logits.float64": Tolerance(1e-10, 1.5e-14),
    "model.gradients.float64": Tolerance(1e-9, 1e-13),
    "model.logits.float32": Tolerance(5e-5, 1.4e-5),
    "model.gradients.float32": Tolerance(5e-4, 6e-5),
    "model.hidden.float64": Tolerance(1e-10, 2e-14),
    # One model against itself: cached decoding, packs, recomputation.
    "self.float64": Tolerance(1e-10, 2e-14),
    "self.float32": Tolerance(1e-5, 5e-6),
    # KDA in chunks against the recurrence in float64, gates g >= -5 and g >= -60.
    "kda.output.float64": Tolerance(1e-12, 1e-15),
    "kda.output.float32": Tolerance(1e-5, 6e-7),
    "kda.gradients.float32": Tolerance(1e-4, 2e-6),
    "kda.output.float32.hard": Tolerance(2e-5, 2e-6),
    "kda.gradients.float32.hard": Tolerance(2e-4, 2e-5),
    # KDA with q, k, v, o and their gradients in bfloat16 against the same values in float32.
    "kda.bfloat16": Tolerance(2**-8, 2e-3),
    # Blockwise attention, grouped experts, chunked cross-entropy against their references.
    "attention.float64": Tolerance(1e-12, 1e-15),
    "attention.float32": Tolerance(1e-5, 6e-7),
    # The same with bfloat16 in and out; keys and values per head are rounded as well.
    "attention.bfloat16": Tolerance(2**-6, 6.5e-3),
    "experts.float64": Tolerance(1e-12, 2e-15),
    "experts.float32": Tolerance(1e-5, 1.1e-6),
    "cross_entropy.float64": Tolerance(1e-12, 4e-15),
    # CUDA kernels in float32 against float64, in the interpreter; gates of -60 among them.
    "triton.float32": Tolerance(2e-5, 2e-6),
    # Products with a weight that is upcast in blocks.
    "linear.float64": Tolerance(1e-12, 1e-15),
    # Residual strategies and gated activations in one pass against their equations.
    "residual.float64": Tolerance(1e-12, 1e-14),
    "activation.float64": Tolerance(1e-12, 1e-15),
    "cross_entropy.float32": Tolerance(1e-5, 3e-7),
    # Ten AdamW steps against other trainers: the losses, and the adapter they end with, which
    # is stored in float32.
    "curve.loss.float64": Tolerance(1e-12, 1.1e-15),
    "curve.loss.float32": Tolerance(1e-5, 3e-7),
    "curve.adapter.float64": Tolerance(1e-6, 6e-8),
    "curve.adapter.float32": Tolerance(1e-4, 3e-6),
    # Merged weights against base plus adapter, in the storage dtype of the base.
    "merge.float32": Tolerance(1e-5, 2e-6),
    # Median token logits of a merged checkpoint against base + adapter, with the choices of the
    # latter forced, by the dtype or the packed form that changed matrices were written in.
    "merge.logits.float32": Tolerance(1e-4, 5e-6),
    "merge.logits.bfloat16": Tolerance(5e-2, 3e-2),
    "merge.logits.FP8": Tolerance(3e-1, 2.5e-1),
    "merge.logits.INT4": Tolerance(3e-1, 1.3e-1),
    "merge.logits.MXFP4": Tolerance(3e-1, 2.5e-1),
}


def limit(kind: str) -> float:
    """The limit of a kind of comparison.

    Raises:
        KeyError: the table has no such kind.
    """
    return TOLERANCES[kind].limit
