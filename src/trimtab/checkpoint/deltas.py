"""What an adapter does to base matrices, some rows at a time.

Knows: W + scaling * B A, and weights trained in full. Does not know: stored forms, files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.checkpoint.adapter import AdapterFile
from trimtab.checkpoint.expert_adapter import matrix_factors


class Deltas:
    """The changes that an adapter makes.

    Args:
        adapter: a read adapter; None changes nothing.

    `names` are the parameters that change.
    """

    def __init__(self, adapter: AdapterFile | None) -> None:
        self._tensors = adapter.tensors if adapter is not None else {}
        targets = adapter.targets if adapter is not None else ()
        self._by_name = {
            target.fqn if target.experts is not None else f"{target.fqn}.weight": target
            for target in targets
        }
        self._full = {name for name in self._tensors if ".lora." not in name}
        self.names = frozenset(self._by_name) | self._full

    def applied(self, name: str, index: tuple[int, ...], rows: slice, value: Tensor) -> Tensor:
        """Rows of a base matrix with what the adapter makes of them.

        Args:
            name: parameter.
            index: leading indices of the matrix in it.
            rows: which rows of the matrix.
            value: those rows of the base, [m, in], at least float32.

        Returns:
            [m, in] in the dtype of `value`.
        """
        if name in self._full:
            whole = self._tensors[name][index]
            return whole.reshape(-1, value.shape[-1])[rows].to(value.dtype)
        target = self._by_name.get(name)
        if target is None:
            return value
        a, b = matrix_factors(target, self._tensors, index)
        return torch.addmm(value, b[rows].to(value.dtype), a.to(value.dtype), alpha=target.scaling)
