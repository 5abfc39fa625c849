"""Parameters trained in full: a float32 master in place of each frozen one, which is kept aside.

The kept parameter gives the base model back, for evaluation, and the storage dtype of a merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

FROZEN = "frozen"
NO_GRADIENT = frozenset({"e_score_correction_bias"})
"""Leaves that a rule moves, not a gradient."""

Frozen = dict[str, nn.Parameter]


def train_full(model: nn.Module, names: Iterable[str]) -> None:
    """Make parameters trainable, in at least float32.

    Args:
        model: with values, not on meta.
        names: of parameters, such as `projector.proj.0.weight`.
    """
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        frozen: Frozen | None = getattr(module, FROZEN, None)
        if frozen is None:
            # A plain dictionary: no module owns the parameters of the base any more.
            frozen = {}
            setattr(module, FROZEN, frozen)
        frozen[leaf] = module.get_parameter(leaf)
        setattr(module, leaf, _master(frozen[leaf], gradient=leaf not in NO_GRADIENT))


def _master(parameter: nn.Parameter, *, gradient: bool) -> nn.Parameter:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(wide, copy=True), requires_grad=gradient)


def full_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Frozen]]:
    """Modules with parameters trained in full, by name, with those they started from."""
    for name, module in model.named_modules():
        frozen: Frozen | None = getattr(module, FROZEN, None)
        if frozen:
            yield name, module, frozen


def full_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The masters by parameter name."""
    return {
        f"{name}.{leaf}": module.get_parameter(leaf)
        for name, module, frozen in full_modules(model) for leaf in frozen
    }


def put_back(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Frozen:
    """Give a module these parameters and return those it had."""
    before = {leaf: module.get_parameter(leaf) for leaf in parameters}
    for leaf, parameter in parameters.items():
        setattr(module, leaf, parameter)
    return before


def merge_full(model: nn.Module) -> None:
    """Put the trained values into the frozen parameters, in their storage dtype."""
    for _, module, frozen in list(full_modules(model)):
        for leaf, trained in put_back(module, frozen).items():
            frozen[leaf].data.copy_(trained.detach())
        delattr(module, FROZEN)
