"""LoRA on the routed experts of a layer: one child of gate_up, one of down.

Knows: A and B with their expert axis, initial values, dropout keys, one expert's delta. Does not
know: how the operator applies them (`ops.moe`).

As for a Linear there is no random state: the initial A of an expert follows from (seed, module
name, expert), a mask from (seed, step, module name, global token number, expert, feature).
Letters: E experts, r adapter rank, F FFN width, D width the experts work on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trimtab.arch.adapter import ExpertAxes, LoRATarget
from trimtab.models.context import ForwardContext
from trimtab.models.seeds import name_seed
from trimtab.ops.moe.lora import ExpertLoRA


class ExpertAdapter(nn.Module):
    """The low-rank child of the experts' gate_up or down.

    Args:
        target: where it sits, its axes, rank, alpha and dropout.
        seed: of the initial A; B starts at zero.

    Parameters: `A` and `B`, float32, of the shapes that `target.shape` gives.
    """

    def __init__(self, target: LoRATarget, seed: int) -> None:
        super().__init__()
        assert target.experts is not None, f"{target.fqn} is no target over experts"
        self.fqn, self.axes = target.fqn, target.experts
        self.scaling, self.dropout = target.scaling, target.dropout
        self.A = nn.Parameter(_initial(target, self.axes, seed))
        self.B = nn.Parameter(torch.zeros(target.shape("B"), dtype=torch.float32))
        self.enabled = True

    def pair(self, ctx: ForwardContext) -> ExpertLoRA | None:
        """What the experts operator takes; None while the adapter is switched off."""
        if not self.enabled:
            return None
        rate, key = 0.0, 0
        if ctx.dropout is not None and self.dropout > 0:
            rate = self.dropout
            key = name_seed(ctx.dropout.seed, f"{ctx.dropout.step}/{self.fqn}")
        return ExpertLoRA(self.A, self.B, self.axes.layout, self.scaling, rate, key)

    def delta(self, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """scaling * B A of one expert, [2, F, D] or [D, F], in `dtype`; zero while switched off."""
        value = expert_delta(self.axes, self.A, self.B, self.scaling, expert, dtype)
        return value if self.enabled else torch.zeros_like(value)


def expert_delta(
    axes: ExpertAxes, A: Tensor, B: Tensor, scaling: float, expert: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """scaling * B A of one expert.

    Args:
        axes: of the target.
        A: all of A.
        B: all of B.
        scaling: factor.
        expert: its number.
        dtype: computed in.

    Returns:
        [2, F, D] for gate_up, [D, F] for down.
    """
    a = A if axes.shares("A") else A[expert]
    b = B if axes.shares("B") else B[expert]
    return (b.to(dtype) @ a.to(dtype)) * scaling


def _initial(target: LoRATarget, axes: ExpertAxes, seed: int) -> Tensor:
    """The initial A; an expert's share does not depend on which others are held here."""
    bound = math.sqrt(3.0 / target.in_features)
    A = torch.empty(target.shape("A"), dtype=torch.float32)
    names = [target.fqn] if axes.shares("A") else [f"{target.fqn}/{e}" for e in range(axes.num_experts)]
    for part, name in zip([A] if axes.shares("A") else A, names, strict=True):
        part.uniform_(-bound, bound, generator=torch.Generator().manual_seed(name_seed(seed, name)))
    return A
