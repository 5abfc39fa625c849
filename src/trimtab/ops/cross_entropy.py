"""Cross-entropy of next tokens over a large vocabulary.

    lse_r  = logsumexp(W h_r)
    loss_r = lse_r - (W h_r)[label_r] + z lse_r^2        0 where label_r is IGNORE_INDEX

Letters: R rows, D hidden, W vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.ops.checks import check_floating, check_shape, require, values_readable
from trimtab.ops.fused.cross_entropy import IGNORE_INDEX, fused_token_losses, workspace_bytes
from trimtab.ops.precision import island_dtype, linear
from trimtab.ops.registry import Implementation, OpCase, Operator


def token_losses_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0
) -> Tensor:
    """The equation with all logits at once.

    Args:
        hidden: [R, D].
        weight: [W, D], the output head.
        labels: [R] int64, within 0..W-1 or `IGNORE_INDEX`.
        z_loss: factor of the squared logsumexp, which keeps logits from drifting.

    Returns:
        [R] in at least float32, nats.
    """
    logits = linear(hidden, weight)
    wide = logits.to(island_dtype(logits))
    losses = torch.nn.functional.cross_entropy(
        wide, labels, ignore_index=IGNORE_INDEX, reduction="none"
    )
    penalty = z_loss * torch.logsumexp(wide, 1).square()
    return losses + penalty * (labels != IGNORE_INDEX)


def token_losses_case(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0
) -> OpCase:
    """The case of a call, after its arguments were checked.

    Raises:
        OperatorError: TT111, a shape, dtype or label is wrong.
    """
    del z_loss
    check_shape("cross_entropy.hidden", hidden, "R D")
    count, width = hidden.shape
    check_shape("cross_entropy.weight", weight, "W D", {"D": width})
    check_shape("cross_entropy.labels", labels, "R", {"R": count})
    check_floating("cross_entropy.hidden", hidden)
    require(labels.dtype is torch.int64, "cross_entropy.labels", "must be int64", labels.dtype)
    if values_readable(labels) and count:
        wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= len(weight)))]
        rule = f"must be within 0..{len(weight) - 1}, or {IGNORE_INDEX} where nothing is supervised"
        require(not len(wrong), "cross_entropy.labels", rule, wrong[:3].tolist())
    return OpCase(hidden.device.type, hidden.dtype, {"R": count, "D": width, "W": len(weight)})


CROSS_ENTROPY: Operator[[Tensor, Tensor, Tensor, float], Tensor] = Operator(
    "cross_entropy", token_losses_case,
    (
        Implementation(
            "tiles", fused_token_losses, workspace_bytes=lambda case: workspace_bytes(case.shapes)
        ),
        Implementation("reference", token_losses_reference),
    ),
    {"R": 4096, "D": 7168, "W": 163840},
)
