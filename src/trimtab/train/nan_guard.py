"""Where a number stopped being finite: the first operation of a step that made NaN or infinity.

Knows: operations as they are dispatched, modules by name. Does not know: why.

The step is run again with every operation looked at, which is slow and happens only when a loss
or gradient is not finite. Minus infinity is no fault: masks are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def first_fault(
    model: nn.Module, parameters: Sequence[Parameter], run: Callable[[], None]
) -> str:
    """Run something once more and say in words where the first fault lies.

    Args:
        model: whose modules are named; its weights are looked at first.
        parameters: trained tensors.
        run: forward and backward passes; gradients it leaves are dropped.
    """
    broken = next((name for name, p in model.named_parameters() if _is_faulty(p)), None)
    if broken is not None:
        return f"{broken} itself is not finite"
    watch = _Watch()
    with _named_modules(model, watch), watch:
        run()
    for parameter in parameters:
        parameter.grad = None
    if watch.found is None:
        return "no single operation: finite numbers add up to more than the type holds"
    return watch.found


_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Watch(TorchDispatchMode):
    """Remembers the first operation with sound inputs and a faulty output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.found: str | None = None
        self.stack: list[str] = []
        self.backward_at: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        sound = self.found is not None or not any(map(_is_faulty, tree_leaves((args, kwargs))))
        out = func(*args, **kwargs)
        if self.found is None and sound and any(map(_is_faulty, tree_leaves(out))):
            name = str(func).removesuffix(".default")
            self.found = f"{self._place()}, operation {name}"
        return out

    def _place(self) -> str:
        if self.stack:
            return f"module {self.stack[-1]}"
        if self.backward_at is not None:
            return f"backward pass at module {self.backward_at}"
        return "outside the modules"


def _is_faulty(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dtype not in _WIDE or not value.numel():
        return False
    with torch.no_grad():
        detached = value.detach()
        return bool(detached.isnan().any()) or bool((detached == torch.inf).any())


@contextmanager
def _named_modules(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Keeps the watch's stack of running modules, and where the backward pass is."""
    hooks = []
    for name, module in model.named_modules():
        shown = name or type(module).__name__

        def enter(_module: nn.Module, _inputs: Any, shown: str = shown) -> None:
            watch.stack.append(shown)

        def leave(_module: nn.Module, _inputs: Any, out: Any, shown: str = shown) -> None:
            if watch.stack:
                watch.stack.pop()
            if isinstance(out, Tensor) and out.requires_grad:

                def at(_grad: Tensor) -> None:
                    watch.backward_at = shown

                out.register_hook(at)

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
