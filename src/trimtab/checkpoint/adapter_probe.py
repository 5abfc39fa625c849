"""A numeric fingerprint of what an adapter computes, written beside it and compared on loading.

Keys and shapes can all fit while an axis was read in another order, above all where sizes agree.
So the manifest holds `u (scaling B A) v` of some matrices with fixed u and v, and a reader that
gets other numbers has another adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from trimtab.arch.adapter import LoRATarget
from trimtab.checkpoint.expert_adapter import matrix_factors
from trimtab.errors import AdapterError

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


def probe(targets: Sequence[LoRATarget], tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Numbers per target: one matrix, or those of the first, middle and last expert."""
    return {
        target.fqn: [_number(target, tensors, index)[0] for index in _indices(target)]
        for target in targets
    }


def check_probe(
    expected: object, targets: Sequence[LoRATarget], tensors: Mapping[str, Tensor], where: str
) -> None:
    """Fail unless the adapter read computes what the adapter written computed.

    Args:
        expected: `probe` as the manifest has it; anything that is no mapping was not written.
        targets: as read.
        tensors: as read.
        where: the directory.

    Raises:
        AdapterError: TT502, naming the target.
    """
    if not isinstance(expected, Mapping):
        return
    for target in targets:
        numbers = expected.get(target.fqn)
        indices = _indices(target)
        if not isinstance(numbers, list) or len(numbers) != len(indices):
            raise AdapterError("TT502", f"{where}: {target.fqn}", "its probe is not in the manifest")
        for index, number in zip(indices, numbers, strict=True):
            found, scale = _number(target, tensors, index)
            if not math.isclose(found, number, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE * scale):
                raise AdapterError(
                    "TT502", f"{where}: {target.fqn}{list(index) or ''}",
                    f"computes {found:.9g} on the probe, {number:.9g} was written: its axes were "
                    "read in another order, or the file was changed", value=found,
                )


def _indices(target: LoRATarget) -> list[tuple[int, ...]]:
    if target.experts is None:
        return [()]
    last = target.experts.num_experts - 1
    experts = sorted({0, last // 2, last})
    if target.experts.parts == 1:
        return [(expert,) for expert in experts]
    return list(product(experts, range(2)))


def _number(
    target: LoRATarget, tensors: Mapping[str, Tensor], index: tuple[int, ...]
) -> tuple[float, float]:
    """u (scaling B A) v, and the size it would have without cancellation."""
    a, b = (factor.to(torch.float64) for factor in matrix_factors(target, tensors, index))
    u, v = _vector(len(b), 31), _vector(a.shape[1], 17)
    exact = target.scaling * float(u @ (b @ (a @ v)))
    size = abs(target.scaling) * float(u.abs() @ (b.abs() @ (a.abs() @ v.abs())))
    return exact, size


def _vector(size: int, step: int) -> Tensor:
    """Entries in (-1, 1) without a period that an axis could have."""
    angle = torch.arange(1, size + 1, dtype=torch.float64).sqrt() * step
    return torch.sin(angle)
