"""Operations a step really does, and the share of the machine's matrix speed that they reach.

Knows: torch's counter of matrix products, and how fast this machine multiplies. Does not know:
architectures: nothing is derived from a formula of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from trimtab.models.decoder import CausalLM
from trimtab.ops.keep import KEPT_OPERATORS, replays
from trimtab.train.batch import MicroBatch
from trimtab.train.step import StepOptions, loss_sums

_SIDE, _TRIES = 512, 5


def count_flops(
    model: CausalLM, batch: MicroBatch, parameters: list[Parameter], options: StepOptions
) -> int:
    """Floating-point operations of the matrix products in one forward and backward pass.

    Recomputed layers count as often as they run, kept results once. The pass is an extra one whose gradients are
    dropped, because a counter may change which kernels run, and with them the last bits.

    Args:
        model: with adapters.
        batch: a micro-batch of the usual size.
        parameters: of the adapters.
        options: of the run.
    """
    with FlopCounterMode(display=False, custom_mapping=_of_kept_operators()) as counter:
        sums = loss_sums(model, batch, 0, options, None)
        totals = [total for total, _ in sums.by_role.values()]
        loss = torch.stack(totals).sum()
        if loss.requires_grad:
            loss.backward()
    for parameter in parameters:
        parameter.grad = None
    return int(counter.get_total_flops())


def _of_kept_operators() -> dict[Any, Any]:
    """Formulas that are 0 where the operator gives back what it kept."""
    found = {}
    for name in KEPT_OPERATORS:
        packet = getattr(torch.ops.trimtab, name, None)
        if packet in flop_registry:
            found[packet] = _unless_kept(flop_registry[packet])
    return found


def _unless_kept(formula: Callable[..., int]) -> Callable[..., int]:
    def flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 0 if replays() else formula(*args, out_val=out_shape, **kwargs)

    return flops


def matrix_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product, the best of a few.

    Args:
        device: where the model is.
        dtype: of the products; a CPU multiplies bfloat16 in float32.
    """
    if device.type == "cpu" and dtype is torch.bfloat16:
        dtype = torch.promote_types(dtype, torch.float32)
    a = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        float((a @ a)[0, 0])  # reading a number waits for an accelerator
        best = min(best, time.perf_counter() - begun)
    return 2.0 * _SIDE**3 / best
