"""Custom operators of torch, registered so that calling one imports nothing more.

`torch.library.custom_op` loads the compiler front end at its first call: seconds, and some 60 MiB of
memory, in every process. The calls below it, used here, do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch

from trimtab.ops.keep import KEPT_OPERATORS, keeping

R = TypeVar("R")


class CustomOp(Generic[R]):
    """An operator that torch knows by name; used like the result of `torch.library.custom_op`.

    Args:
        name: `trimtab::NAME`.
        function: computes; it must not return its inputs nor views of them.
        schema: types of arguments and results; from the annotations of `function` where None.
    """

    def __init__(self, name: str, function: Callable[..., R], schema: str | None = None) -> None:
        schema = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema)
        leaf = name.removeprefix("trimtab::")
        run = keeping(function) if leaf in KEPT_OPERATORS else function
        torch.library.impl(name, "CompositeExplicitAutograd", run)
        self.name = name
        self.packet = getattr(torch.ops.trimtab, leaf)

    def __call__(self, *args: object, **kwargs: object) -> R:
        """Call it through torch's dispatcher."""
        return cast(R, self.packet(*args, **kwargs))

    def register_fake(self, function: Callable[..., object]) -> Callable[..., object]:
        """Say what comes out for tensors without values."""
        torch.library.register_fake(self.name, function)
        return function

    def register_autograd(
        self, backward: Callable[..., object], *, setup_context: Callable[..., None]
    ) -> None:
        """Say how gradients are computed; the arguments are those of `torch.library`."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)


def custom_op(name: str) -> Callable[[Callable[..., R]], CustomOp[R]]:
    """Decorator form of `CustomOp`."""
    return lambda function: CustomOp(name, function)
