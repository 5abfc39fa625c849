"""Modules trained in full: a float32 master in place of each frozen weight, which is kept aside.

The kept weight gives the base model back, for evaluation, and the storage dtype of a merge.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from trimtab.models.linear import FrozenWeight, Linear, RMSNorm


def train_full(model: nn.Module, prefix: str) -> None:
    """Make every weight under a module trainable, in at least float32.

    Args:
        model: with values, not on meta.
        prefix: name of the module, such as `projector`.
    """
    for module in model.get_submodule(prefix).modules():
        if isinstance(module, Linear | RMSNorm):
            module.frozen = FrozenWeight(module.weight)
            wide = torch.promote_types(module.weight.dtype, torch.float32)
            module.weight = nn.Parameter(module.weight.detach().to(wide, copy=True))


def full_modules(model: nn.Module) -> Iterator[tuple[str, Linear | RMSNorm, FrozenWeight]]:
    """Modules trained in full, by name, with the weight they started from."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | RMSNorm) and module.frozen is not None:
            yield name, module, module.frozen


def full_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The masters by parameter name, such as `projector.proj.0.weight`."""
    return {f"{name}.weight": module.weight for name, module, _ in full_modules(model)}


def merge_full(model: nn.Module) -> None:
    """Put the trained values into the frozen weights, in their storage dtype."""
    for _, module, frozen in list(full_modules(model)):
        frozen.weight.data.copy_(module.weight.detach())
        module.weight, module.frozen = frozen.weight, None
