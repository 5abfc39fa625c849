"""Operations a step really does, and the share of the machine's matrix speed that they reach.

Knows: torch's counter of matrix products, and how fast this machine multiplies. Does not know:
architectures: nothing is derived from a formula of the model.
"""

from __future__ import annotations

import time

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

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
    counter = _Counter()
    with counter:
        sums = loss_sums(model, batch, 0, options, None)
        totals = [total for total, _ in sums.by_role.values()]
        loss = torch.stack(totals).sum()
        if loss.requires_grad:
            loss.backward()
    for parameter in parameters:
        parameter.grad = None
    return counter.total


class _Counter(TorchDispatchMode):
    """Adds up torch's formulas for every operator that runs.

    `FlopCounterMode` also follows modules, by hooks that keep the gradients between them alive: three
    times the memory of the step that is counted, where layers are computed again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.total = 0
        self._kept = {getattr(torch.ops.trimtab, name, None) for name in KEPT_OPERATORS}

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        # A kept result that is given back costs nothing.
        if formula is not None and not (packet in self._kept and replays()):
            self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


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
