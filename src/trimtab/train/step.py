"""One optimisation step, written as the algorithm.

Knows: losses, gradients, clipping. Does not know: recipes, files, where packs come from.

Loss = sum over the supervised tokens of the global batch / their number, so the gradient does
not depend on how the batch is cut into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from trimtab.data.packing import IGNORED, Pack
from trimtab.errors import RunError
from trimtab.models.context import DropoutKey, ForwardContext, Recompute
from trimtab.models.decoder import CausalLM
from trimtab.models.tape import ChoiceTape
from trimtab.train.batch import MicroBatch, micro_batches, on_device
from trimtab.train.nan_guard import first_fault
from trimtab.train.plan import BatchPlan
from trimtab.train.router_load import RouterLoad, RoutingOptions, RoutingSink, rebalance

OnNaN = Literal["error", "skip"]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What stays the same over the steps of a run.

    Args:
        plan: how a global batch is cut.
        seed: of the dropout masks.
        max_grad_norm: gradients with a larger global norm are scaled down.
        on_nan: what follows a loss or gradient that is not finite.
        recompute: what is computed again in the backward pass, see `ForwardContext`.
        branches: branch of each parameter, in their order, for the gradient norms.
        routing: what is done about the load of experts.
    """

    plan: BatchPlan
    seed: int
    max_grad_norm: float | None
    on_nan: OnNaN
    recompute: Recompute
    branches: tuple[str, ...] = ()
    routing: RoutingOptions = field(default_factory=RoutingOptions)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step measured.

    Args:
        loss: mean over the supervised tokens, in nats.
        grad_norm: global norm before clipping.
        supervised_tokens: tokens in the loss.
        skipped: True where a number was not finite and the update was left out.
        loss_by_role: mean over the supervised tokens of each kind of source.
        grad_norm_by_branch: norms before clipping; their squares add to that of `grad_norm`.
        fault: of a skipped step, where the first number that is not finite arose.
    """

    loss: float
    grad_norm: float
    supervised_tokens: int
    skipped: bool
    loss_by_role: dict[str, float]
    grad_norm_by_branch: dict[str, float]
    fault: str | None = None


def train_step(
    model: CausalLM,
    packs: Sequence[Pack],
    parameters: Sequence[Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    options: StepOptions,
    load: RouterLoad | None = None,
) -> StepResult:
    """Forward, backward, clip and update on one global batch.

    Args:
        model: base with adapters injected.
        packs: the packs of the global batch, in global order.
        parameters: the adapters, those that `optimizer` updates.
        optimizer: its learning rates are already those of this step.
        step: number of the step, from 0; with the seed it fixes the dropout masks.
        options: batch plan, clipping, what to do on NaN.
        load: counts the tokens of each expert.

    Raises:
        RunError: TT602, loss or gradient is not finite and `on_nan` is "error".
    """
    optimizer.zero_grad(set_to_none=True)
    supervised = sum(int(pack.num_supervised) for pack in packs)
    real = sum(int(pack.valid.sum()) for pack in packs)
    loss = 0.0
    sums: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for batch in micro_batches(packs, options.plan):
        found = loss_sums(model, batch, step, options, load)
        part = torch.stack([total for total, _ in found.by_role.values()]).sum() / max(1, supervised)
        loss += part.item()
        if found.balance is not None:
            part = part + options.routing.aux_loss_coef * found.balance / max(1, real)
        if part.requires_grad:
            part.backward()
        for role, (total, count) in found.by_role.items():
            sums[role] = sums.get(role, 0.0) + total.item()
            tokens[role] = tokens.get(role, 0) + count
    by_branch = norm_by_branch(parameters, options.branches)
    grad_norm = clip_gradients(parameters, options.max_grad_norm)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    fault = None
    if not finite:
        fault = _first_fault(model, packs, parameters, step, options)
        if options.on_nan == "error":
            raise RunError(
                "TT602", f"step {step + 1}", f"loss {loss}, gradient norm {grad_norm}; the first "
                f"number that is not finite: {fault}",
                hint="lower finetune.optimizer.lr, set compute_dtype: fp32, or set finetune.on_nan: "
                "skip to leave such steps out",
            )
    if finite:
        optimizer.step()
        if options.routing.balance == "quantile" and load is not None:
            rebalance(model, load)
    by_role = {role: total / max(1, tokens[role]) for role, total in sums.items()}
    return StepResult(loss, grad_norm, supervised, not finite, by_role, by_branch, fault)


def _first_fault(
    model: CausalLM, packs: Sequence[Pack], parameters: Sequence[Parameter], step: int,
    options: StepOptions,
) -> str:
    """Where the first number that is not finite arises in this step, in words."""

    def again() -> None:
        for batch in micro_batches(packs, options.plan):
            for total, _ in loss_sums(model, batch, step, options, None).by_role.values():
                if total.requires_grad:
                    total.backward(retain_graph=True)

    return first_fault(model, parameters, again)


def clip_gradients(parameters: Iterable[Parameter], max_norm: float | None) -> float:
    """Scale all gradients to a global norm of at most `max_norm`; return the norm before.

    The squares are summed in float64: each parameter counts once, in any order to the same bits
    that matter.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = [g.to(torch.float64).square().sum() for g in gradients]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm


def norm_by_branch(
    parameters: Sequence[Parameter], branches: Sequence[str]
) -> dict[str, float]:
    """Gradient norm of the parameters of each branch, by branch in order of first appearance."""
    squares: dict[str, float] = {}
    for parameter, branch in zip(parameters, branches, strict=False):
        grad = parameter.grad
        square = 0.0 if grad is None else float(grad.to(torch.float64).square().sum())
        squares[branch] = squares.get(branch, 0.0) + square
    return {branch: math.sqrt(square) for branch, square in squares.items()}


@dataclass(frozen=True, slots=True)
class LossSums:
    """Losses of one micro-batch, summed over its tokens.

    Args:
        by_role: in nats and the number of supervised tokens, by the role of their source; a
            micro-batch without any has one sum of no tokens.
        balance: load-balancing loss of all layers over all real tokens; None where it is not asked
            for.
    """

    by_role: dict[str, tuple[Tensor, int]]
    balance: Tensor | None


def loss_sums(
    model: CausalLM, batch: MicroBatch, step: int, options: StepOptions, load: RouterLoad | None
) -> LossSums:
    """Forward pass of one micro-batch up to its losses; `load` counts what its routers do."""
    device = model.embed.weight.device
    sink = RoutingSink(load, batch.lengths if options.routing.balance == "aux" else None)
    context = ForwardContext.packed(
        batch.lengths,
        device,
        valid=batch.valid.to(device),
        token_ids=batch.token_ids.to(device),
        # Recomputed layers must route their tokens as the first pass did.
        tape=None if options.recompute == "none" else ChoiceTape(),
        stats=sink,
        dropout=DropoutKey(options.seed, step),
        recompute=options.recompute,
        images=on_device(batch.images, device),
        capacity=options.routing.capacity,
    )
    labels = batch.labels.to(device)
    hidden = model(batch.input_ids.to(device), context)  # [T, D]
    rows = (labels != IGNORED).nonzero().squeeze(1)
    losses = model.token_losses(hidden[rows], labels[rows])
    general = batch.general.to(device)[rows]
    found: dict[str, tuple[Tensor, int]] = {}
    for role, of_role in (("domain", ~general), ("general", general)):
        count = int(of_role.sum())
        if count or (role == "domain" and not len(rows)):
            found[role] = (losses[of_role].sum(), count)
    return LossSums(found, sink.balance)
