"""CPU time of a piece of work by operator, forward and backward.

Operators of Trimtab count as one, whatever runs inside; products of plain linear maps are taken
together, and so are the remaining operators of torch. What is left is Python and autograd.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv"}


class _Clock(TorchDispatchMode):
    """Seconds of this thread by group of operators; nested calls count for the outermost."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = time.thread_time()
        out = func(*args, **(kwargs or {}))
        self.seconds[_group(func)] += time.thread_time() - begin
        return out


def _group(func: Any) -> str:
    space, _, name = func.overloadpacket._qualified_op_name.partition("::")
    if space == "trimtab":
        return str(name)
    return "products of linear maps" if name in _PRODUCTS else "other operators of torch"


def op_shares(work: Callable[[], object], least: float = 0.002) -> dict[str, float]:
    """Share of the CPU time of `work` by operator, the largest first, those below `least` as one."""
    clock = _Clock()
    begin = time.thread_time()
    with clock:
        work()
    total = time.thread_time() - begin
    small = [name for name, spent in clock.seconds.items() if spent < least * total]
    shares = {name: spent / total for name, spent in clock.seconds.items() if name not in small}
    shares["smaller ones"] = sum(clock.seconds[name] for name in small) / total
    shares["Python and autograd"] = 1 - sum(clock.seconds.values()) / total
    return {name: round(share, 4) for name, share in sorted(shares.items(), key=lambda e: -e[1])}
