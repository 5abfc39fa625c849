"""How an operator finds the implementation that runs a call.

Knows: ordered implementations, each with the cases it supports. The choice is by device, dtype and
shape of the call, never by which packages import. Does not know: which operators exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, ParamSpec, TypeVar

import torch

from trimtab.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class OpCase:
    """One call as far as the choice of an implementation may depend on it.

    Args:
        device: device type, such as `cpu` or `cuda`.
        dtype: dtype of the activations.
        shapes: sizes by letter of the notation, such as {"T": 4096, "H": 8}.
    """

    device: str
    dtype: torch.dtype
    shapes: Mapping[str, int]


def always(case: OpCase) -> str | None:
    """Supports every case."""
    del case
    return None


@dataclass(frozen=True, slots=True)
class Implementation(Generic[P, R]):
    """One way to compute an operator.

    Args:
        name: what a recipe calls it.
        run: computes; every implementation of an operator has the same signature.
        supports: None for a case it can run, else the reason why not, in words.
        workspace_bytes: bytes it allocates for a case beside its inputs and outputs, where known.
        slower: why a later one is faster for a case, by a cost model, or None; not asked when forced.
    """

    name: str
    run: Callable[P, R]
    supports: Callable[[OpCase], str | None] = always
    workspace_bytes: Callable[[OpCase], int] | None = None
    slower: Callable[[OpCase], str | None] = always

    def refuses(self, case: OpCase) -> str | None:
        """Why it should not run a case, or None."""
        return self.supports(case) or self.slower(case)


@dataclass(frozen=True, slots=True)
class Choice:
    """What became of one implementation for a case.

    Args:
        name: the implementation.
        chosen: whether it runs.
        reason: why it does not run; None where it could.
    """

    name: str
    chosen: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Operator(Generic[P, R]):
    """An operator: the first of its implementations that supports a call runs it.

    Args:
        name: what a recipe calls it.
        case: the case of a call, from its arguments.
        implementations: fastest first; the last one runs everywhere.
        typical: sizes of a call to explain the choice with.
    """

    name: str
    case: Callable[P, OpCase]
    implementations: tuple[Implementation[P, R], ...]
    typical: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first implementation that supports this call.

        Raises:
            ConfigError: TT110, a forced implementation does not support it.
        """
        return self.choose(self.case(*args, **kwargs)).run(*args, **kwargs)

    def choose(self, case: OpCase) -> Implementation[P, R]:
        """The implementation that runs `case`.

        Raises:
            ConfigError: TT110, none of those allowed supports it.
        """
        reason = None
        for implementation in self.implementations:
            reason = implementation.refuses(case)
            if reason is None:
                return implementation
        raise ConfigError(
            "TT110", f"ops.{self.name}", reason or "has no implementation",
            value=self.implementations[-1].name, hint=f"leave ops.{self.name} out of the recipe",
        )

    def force(self, name: str) -> Operator[P, R]:
        """The same operator with one implementation only.

        Raises:
            ConfigError: TT102, there is no such implementation.
        """
        for implementation in self.implementations:
            if implementation.name == name:
                only = (replace(implementation, slower=always),)
                return Operator(self.name, self.case, only, self.typical)
        known = ", ".join(each.name for each in self.implementations)
        raise ConfigError("TT102", f"ops.{self.name}", f"must be one of {known}", value=name)

    def explain(self, case: OpCase) -> list[Choice]:
        """Every implementation in order, with why it does not run where it does not."""
        found, taken = [], False
        for implementation in self.implementations:
            reason = implementation.refuses(case)
            chosen = reason is None and not taken
            taken = taken or chosen
            found.append(Choice(implementation.name, chosen, reason))
        return found
