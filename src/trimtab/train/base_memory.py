"""Bytes of the frozen base as it lies in memory, beside what it would take in bfloat16.

Knows: parameters of a loaded model, the inventory. Does not know: peaks, adapters, recipes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.units import format_bytes

_BYTES = {"F32": 4}  # every other float is 2 bytes wide in a bfloat16 base


@dataclass(frozen=True, slots=True)
class BaseMemory:
    """Bytes of the base.

    Args:
        experts: of routed experts, scales included.
        experts_bf16: of the same in bfloat16.
        total: of all parameters that were loaded.
        total_bf16: of the same in bfloat16, tensors released in float32 kept so.
    """

    experts: int
    experts_bf16: int
    total: int
    total_bf16: int

    def __str__(self) -> str:
        whole = f"{format_bytes(self.total)}, {self.total / self.total_bf16:.3f} of a bf16 base"
        if not self.experts_bf16:
            return f"base in memory: {whole}"
        share = self.experts / self.experts_bf16
        return (f"base in memory: {whole}; routed experts {format_bytes(self.experts)}, "
                f"{share:.4f} of theirs")


def base_memory(model: nn.Module, arch: ArchSpec) -> BaseMemory:
    """Count the parameters of a loaded model, before or after adapters were injected.

    Args:
        model: with or without its vision tower.
        arch: its architecture.
    """
    parameters = dict(model.named_parameters())
    sums = {"experts": 0, "experts_bf16": 0, "total": 0, "total_bf16": 0}
    for spec in inventory(arch):
        names = (spec.name, *(f"{spec.name}.{leaf}" for leaf in ("weight", "packed", "scale")))
        kept = sum(parameters[n].nbytes for n in names if n in parameters)
        if not kept:  # a tower that was not loaded
            continue
        wide = spec.numel * _BYTES.get(spec.dtype, 2)
        for key in ("experts", "total") if spec.owner == "routed_expert" else ("total",):
            sums[key] += kept
            sums[f"{key}_bf16"] += wide
    return BaseMemory(**sums)
