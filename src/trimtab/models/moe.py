"""Feed-forward layers: one gated FFN, and the sparse mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.arch.quantization import PackedForm
from trimtab.arch.spec import ActivationSpec, MoESpec
from trimtab.models.context import ForwardContext, Routing
from trimtab.models.experts import DenseWeight
from trimtab.models.linear import Linear, RMSNorm
from trimtab.models.packed import PackedWeight
from trimtab.ops.backends import OpTable
from trimtab.ops.moe.capacity import drop_beyond
from trimtab.ops.moe.loop import ExpertCall
from trimtab.ops.moe.routing import RouterRule, expert_weights, select_experts
from trimtab.ops.precision import island_dtype

# How gate and up, and how down stay packed; None where they are decoded.
ExpertForms = tuple[PackedForm | None, PackedForm | None]


class GatedFFN(nn.Module):
    """down( act(gate x, up x) )."""

    def __init__(
        self, d: int, f: int, activation: ActivationSpec, dtype: torch.dtype, ops: OpTable
    ) -> None:
        super().__init__()
        self.activation, self.act = activation, ops.activation
        self.gate_proj = Linear(d, f, dtype)
        self.up_proj = Linear(d, f, dtype)
        self.down_proj = Linear(f, d, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, D] -> [T, D]."""
        act = self.act(self.activation, self.gate_proj(x, ctx), self.up_proj(x, ctx))
        y: Tensor = self.down_proj(act, ctx)
        return y


class Router(nn.Module):
    """Scores every expert for every token and picks A of them."""

    def __init__(
        self, spec: MoESpec, d: int, dtype: torch.dtype, bias_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.rule = RouterRule(
            spec.top_k, spec.groups, spec.topk_groups, spec.renormalise, spec.scale
        )
        shape = (spec.num_experts, d)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(spec.num_experts, dtype=bias_dtype), requires_grad=False
        )

    def forward(self, x: Tensor, ctx: ForwardContext, layer: int) -> tuple[Tensor, Tensor]:
        """Expert ids [T, A] and their weights [T, A] in at least float32.

        Ids are ascending before the capacity takes effect; E stands for a dropped choice.
        """
        dtype = island_dtype(x)
        scores = torch.sigmoid(x.to(dtype) @ self.weight.to(dtype).mT)
        bias = self.e_score_correction_bias
        ids = ctx.choose(layer, "experts", lambda: select_experts(scores, bias, self.rule))
        kept, dropped = ids, None
        if ctx.capacity is not None:
            kept, dropped = drop_beyond(ids, len(bias), ctx.capacity, ctx.valid)
        if ctx.stats is not None:
            ctx.stats(Routing(layer, scores, bias, ids, dropped, ctx.valid))
        return kept, expert_weights(scores, ids, self.rule)


class Experts(nn.Module):
    """The routed experts of one layer.

    Args:
        spec: their number and width.
        width: of their input and output.
        dtype: storage dtype of matrices that are not packed.
        ops: operators.
        packed: the form that gate and up, and that down, stay packed in.
    """

    def __init__(
        self, spec: MoESpec, width: int, dtype: torch.dtype, ops: OpTable,
        packed: ExpertForms = (None, None),
    ) -> None:
        super().__init__()
        self.activation, self.ops = spec.activation, ops
        e, f = spec.num_experts, spec.intermediate_size
        shapes = ((e, 2, f, width), (e, width, f))
        self.gate_up, self.down = (
            DenseWeight(shape, dtype) if form is None else PackedWeight(shape, form, ops.packed_decode)
            for shape, form in zip(shapes, packed, strict=True)
        )

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, ctx: ForwardContext) -> Tensor:
        """Weighted sum over each token's experts.

        Args:
            x: [T, D].
            ids: [T, A], distinct in each row; those outside [0, E) count for nothing.
            weights: [T, A].
            ctx: the pack, for dropout of the adapters.

        Returns:
            [T, D], summed in at least float32 in ascending expert order.
        """
        lora_gate_up, lora_down = (
            None if module.lora is None else module.lora.pair(ctx)
            for module in (self.gate_up, self.down)
        )
        return self.ops.experts(ExpertCall(
            x, ids, weights, self.gate_up.matrices, self.down.matrices, self.activation,
            lora_gate_up, lora_down, ctx.token_ids,
        ))


class MoE(nn.Module):
    """Router, routed experts (in a latent where the spec says so) and the shared expert.

        z = latent_down x;  m = sum_e w_e expert_e(z);  y = latent_up norm(m) + shared(x)
    """

    def __init__(
        self, spec: MoESpec, d: int, layer: int, dtype: torch.dtype, bias_dtype: torch.dtype,
        ops: OpTable, packed: ExpertForms = (None, None),
    ) -> None:
        super().__init__()
        self.layer = layer
        self.router = Router(spec, d, dtype, bias_dtype)
        latent = spec.latent
        width = d if latent is None else latent.size
        self.latent_down = None if latent is None else Linear(d, width, dtype)
        self.experts = Experts(spec, width, dtype, ops, packed)
        self.latent_norm = None
        if latent is not None and latent.norm_eps is not None:
            self.latent_norm = RMSNorm(width, latent.norm_eps, dtype)
        self.latent_up = None if latent is None else Linear(width, d, dtype)
        self.shared_experts = None
        if spec.shared_intermediate_size:
            f = spec.shared_intermediate_size
            self.shared_experts = GatedFFN(d, f, spec.activation, dtype, ops)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, D] -> [T, D]."""
        ids, weights = self.router(x, ctx, self.layer)
        z = x if self.latent_down is None else self.latent_down(x, ctx)
        m: Tensor = self.experts(z, ids, weights, ctx)
        if self.latent_norm is not None:
            m = self.latent_norm(m)
        if self.latent_up is not None:
            m = self.latent_up(m, ctx)
        return m if self.shared_experts is None else m + self.shared_experts(x, ctx)
