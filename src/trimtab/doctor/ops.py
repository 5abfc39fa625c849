"""Which implementation of each operator runs here, and why the faster ones do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trimtab.ops.backends import build_ops
from trimtab.ops.registry import Choice, OpCase


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """One operator on one device.

    Args:
        name: the operator.
        case: the call it was asked about.
        choices: its implementations, fastest first.
        workspace_bytes: what the chosen one allocates beside inputs and outputs, where known.
    """

    name: str
    case: OpCase
    choices: tuple[Choice, ...]
    workspace_bytes: int | None

    @property
    def chosen(self) -> str | None:
        """The implementation that runs, None where no allowed one supports the case."""
        return next((choice.name for choice in self.choices if choice.chosen), None)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "operator": self.name, "device": self.case.device, "dtype": _dtype(self.case.dtype),
            "shapes": dict(self.case.shapes), "runs": self.chosen,
            "workspace_bytes": self.workspace_bytes,
            "implementations": [
                {"name": c.name, "runs": c.chosen, "reason": c.reason} for c in self.choices
            ],
        }


def report_ops(
    device: str, dtype: torch.dtype, overrides: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[OperatorReport]:
    """Every operator with its implementations for a typical call.

    Args:
        device: device type, such as `cpu`.
        dtype: of activations.
        overrides: implementations a recipe would force.
        sizes: sizes by letter in place of the typical ones, such as {"T": 65536}.

    Raises:
        ConfigError: TT102, an operator or implementation that does not exist.
    """
    reports = []
    for name, operator in build_ops(overrides).operators().items():
        shapes = {key: (sizes or {}).get(key, size) for key, size in operator.typical.items()}
        case = OpCase(device, dtype, shapes)
        choices = tuple(operator.explain(case))
        implementations = {each.name: each for each in operator.implementations}
        chosen = next((choice.name for choice in choices if choice.chosen), None)
        size = implementations[chosen].workspace_bytes if chosen else None
        reports.append(OperatorReport(name, case, choices, size(case) if size else None))
    return reports


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
