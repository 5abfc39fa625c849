"""AdamW over the float32 adapters, grouped by learning rate.

Knows: parameter names, branches and their rates. Does not know: the schedule's curve, the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from trimtab.arch.adapter import LoRATarget
from trimtab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """What the recipe says under `finetune.optimizer`, as plain values.

    Args:
        lr: base learning rate.
        lr_by_branch: group word to learning rate, overriding `lr`.
        weight_decay: decoupled decay.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        lora_b_lr_ratio: factor on the rate of every lora_B.
    """

    lr: float
    lr_by_branch: Mapping[str, float]
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lora_b_lr_ratio: float = 1.0


def build_optimizer(
    parameters: Mapping[str, Parameter], targets: Sequence[LoRATarget], options: OptimizerOptions
) -> torch.optim.AdamW:
    """AdamW with one group per distinct learning rate, in parameter order.

    Args:
        parameters: `{fqn}.lora.A`, `{fqn}.lora.B` and what is trained in full, to float32
            parameters; those without gradient are left out.
        targets: where each adapter belongs, for its branch.
        options: rates and moments.

    Raises:
        ConfigError: a branch of `lr_by_branch` has no adapter.
    """
    branches = dict(zip(parameters, branches_of(parameters, targets), strict=True))
    unused = set(options.lr_by_branch) - set(branches.values()) - _covering(branches)
    if unused:
        word = sorted(unused)[0]
        raise ConfigError(
            "TT105", f"finetune.optimizer.lr_by_branch.{word}", "no adapter is on this branch",
            value=options.lr_by_branch[word],
            hint=f"adapted branches: {', '.join(sorted(set(branches.values())))}",
        )
    groups: dict[float, list[Parameter]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        rate = _rate(options, branches[name])
        if name.endswith(".lora.B"):
            rate *= options.lora_b_lr_ratio
        groups.setdefault(rate, []).append(parameter)
    # foreach and fused variants may sum in another order on another device; the plain loop is
    # the same everywhere and adapters are small.
    return torch.optim.AdamW(
        [{"params": members, "lr": rate, "initial_lr": rate} for rate, members in groups.items()],
        betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, foreach=False,
    )


def branches_of(
    parameters: Mapping[str, Parameter], targets: Sequence[LoRATarget]
) -> tuple[str, ...]:
    """The branch of each trainable tensor, in their order."""
    branches = {target.fqn: target.branch for target in targets}
    full = {True: "router", False: "projector"}
    return tuple(
        branches.get(name.partition(".lora.")[0]) or full[".router." in name] for name in parameters
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale each group's initial rate by `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def _rate(options: OptimizerOptions, branch: str) -> float:
    if branch in options.lr_by_branch:
        return options.lr_by_branch[branch]
    if branch in ("linear_attention", "sparse_attention"):
        return options.lr_by_branch.get("attention", options.lr)
    return options.lr


def _covering(branches: Mapping[str, str]) -> set[str]:
    """`attention` counts as adapted where one of its two branches is."""
    mixers = {"linear_attention", "sparse_attention"} & set(branches.values())
    return {"attention"} if mixers else set()
