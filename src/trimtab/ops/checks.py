"""Checks of operator arguments: shapes and dtypes always, values where they can be read cheaply.

A failed check names the argument, what it is and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.errors import OperatorError


def require(holds: bool, argument: str, rule: str, value: object) -> None:
    """Fail unless a rule holds.

    Args:
        holds: the outcome.
        argument: `operator.argument`.
        rule: what must hold.
        value: what is there.

    Raises:
        OperatorError: TT111, it does not hold.
    """
    if not holds:
        raise OperatorError("TT111", argument, rule, value=value)


def check_shape(argument: str, x: Tensor, letters: str, sizes: Mapping[str, int] | None = None) -> None:
    """Fail unless x has one dimension per letter, of the sizes known.

    Args:
        argument: `operator.argument`.
        x: any tensor.
        letters: such as "B T H K", separated by spaces.
        sizes: what letters must be; others may be anything.

    Raises:
        OperatorError: TT111.
    """
    names, known = letters.split(), sizes or {}
    fits = x.ndim == len(names) and all(
        name not in known or size == known[name] for name, size in zip(names, x.shape, strict=True)
    )
    if not fits:
        want = ", ".join(f"{name}={known[name]}" if name in known else name for name in names)
        require(False, argument, f"must have the shape [{want}]", list(x.shape))


def check_floating(argument: str, x: Tensor) -> None:
    """Fail unless x has a floating dtype.

    Raises:
        OperatorError: TT111.
    """
    require(x.is_floating_point(), argument, "must be floating", x.dtype)


def check_mask(argument: str, x: Tensor, tokens: int) -> None:
    """Fail unless x is bool of shape [T].

    Raises:
        OperatorError: TT111.
    """
    check_shape(argument, x, "T", {"T": tokens})
    require(x.dtype is torch.bool, argument, "must be bool", x.dtype)


def values_readable(x: Tensor) -> bool:
    """Whether the values of x may be checked: on a CPU, and not where only shapes exist."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor) and not torch.compiler.is_compiling()
