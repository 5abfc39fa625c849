"""Modules trained in full: a float32 master in place of each frozen weight, which is kept aside.

The kept weight gives the base model back, for evaluation, and the storage dtype of a merge.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from trimtab.models.linear import FrozenWeight, LayerNormWeights, Linear, RMSNorm

Trainable = Linear | RMSNorm | LayerNormWeights


def train_full(model: nn.Module, prefix: str) -> None:
    """Make every weight and bias under a module trainable, in at least float32.

    Args:
        model: with values, not on meta.
        prefix: name of the module, such as `projector`.
    """
    for module in model.get_submodule(prefix).modules():
        if isinstance(module, Trainable):
            module.frozen = FrozenWeight(module.weight, getattr(module, "bias", None))
            module.weight = _master(module.weight)
            if not isinstance(module, RMSNorm) and module.bias is not None:
                module.bias = _master(module.bias)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(wide, copy=True))


def full_modules(model: nn.Module) -> Iterator[tuple[str, Trainable, FrozenWeight]]:
    """Modules trained in full, by name, with the weight they started from."""
    for name, module in model.named_modules():
        if isinstance(module, Trainable) and module.frozen is not None:
            yield name, module, module.frozen


def full_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The masters by parameter name, such as `projector.proj.0.weight`."""
    return {
        f"{name}.{leaf}": parameter
        for name, module, _ in full_modules(model)
        for leaf, parameter in module.named_parameters(recurse=False)
    }


def put_back(module: Trainable, weights: FrozenWeight) -> FrozenWeight:
    """Give a module these weights and return those it had."""
    before = FrozenWeight(module.weight, getattr(module, "bias", None))
    module.weight = weights.weight
    if not isinstance(module, RMSNorm) and weights.bias is not None:
        module.bias = weights.bias
    return before


def merge_full(model: nn.Module) -> None:
    """Put the trained values into the frozen weights, in their storage dtype."""
    for _, module, frozen in list(full_modules(model)):
        trained = put_back(module, frozen)
        frozen.weight.data.copy_(trained.weight.detach())
        if frozen.bias is not None and trained.bias is not None:
            frozen.bias.data.copy_(trained.bias.detach())
        module.frozen = None
