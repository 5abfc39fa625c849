"""LoRA on the model's Linear modules: y += scaling * B A dropout(x), and all adapters of a model.

A and B are float32 and their own masters. No random state: the initial A follows from
(seed, module name), a dropout mask from (seed, step, module name, global token number, feature),
so that any layout, and recomputation, sees the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.arch.adapter import LoRATarget
from trimtab.errors import AdapterError
from trimtab.models.context import ForwardContext
from trimtab.models.expert_lora import ExpertAdapter
from trimtab.models.experts import DenseWeight
from trimtab.models.full import full_modules, full_parameters, merge_full, put_back
from trimtab.models.linear import Linear
from trimtab.models.packed import PackedWeight
from trimtab.models.seeds import name_seed
from trimtab.ops.dropout import keep_mask
from trimtab.ops.precision import linear


class LoRA(nn.Module):
    """The low-rank child of a Linear.

    Args:
        target: where it sits and its rank, alpha and dropout.
        seed: of the initial A; B starts at zero.
    """

    def __init__(self, target: LoRATarget, seed: int) -> None:
        super().__init__()
        self.fqn, self.scaling, self.dropout = target.fqn, target.scaling, target.dropout
        bound = math.sqrt(1.0 / target.in_features) * math.sqrt(3.0)
        generator = torch.Generator().manual_seed(name_seed(seed, target.fqn))
        A = torch.empty(target.rank, target.in_features, dtype=torch.float32)
        self.A = nn.Parameter(A.uniform_(-bound, bound, generator=generator))
        self.B = nn.Parameter(torch.zeros(target.out_features, target.rank, dtype=torch.float32))
        self.enabled = True

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """The delta [..., out] for x [..., in], in the dtype of x."""
        if not self.enabled:
            return x.new_zeros(*x.shape[:-1], self.B.shape[0])
        if ctx.dropout is not None and self.dropout > 0:
            inner: Tensor = _DroppedProduct.apply(x, self._kept(x, ctx), self.A, self.dropout)  # type: ignore[no-untyped-call]
        else:
            inner = linear(x, self.A)
        return linear(inner, self.B) * self.scaling

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """scaling * B A, [out, in], computed in `dtype`."""
        if not self.enabled:
            return torch.zeros(self.B.shape[0], self.A.shape[1], dtype=dtype)
        return (self.B.to(dtype) @ self.A.to(dtype)) * self.scaling

    def _kept(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, in] bool, False where dropout takes effect."""
        if ctx.dropout is None or ctx.token_ids is None:
            raise ValueError("dropout needs the global token numbers of the pack")
        key = name_seed(ctx.dropout.seed, f"{ctx.dropout.step}/{self.fqn}")
        return keep_mask(ctx.token_ids, x.shape[-1], key, self.dropout)


class _DroppedProduct(torch.autograd.Function):
    """dropout(x) A^T that keeps x, which all adapters on it share, and one byte per element.

    The product of x and its mask is made again in the backward pass: kept, it and the mask as
    numbers would be two more inputs for every adapter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, a: Tensor, rate: float) -> Tensor:
        """[..., in], [..., in] bool, [rank, in] -> [..., rank]."""
        ctx.save_for_backward(x, kept, a)
        ctx.rate = rate
        return linear(x * _mask(kept, x, rate), a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Gradients of x and A."""
        x, kept, a = ctx.saved_tensors
        mask = _mask(kept, x, ctx.rate)
        with torch.enable_grad():
            dropped, matrix = (x * mask).detach().requires_grad_(), a.detach().requires_grad_()
            inner = linear(dropped, matrix)
        to_input, to_matrix = torch.autograd.grad(inner, (dropped, matrix), grad)
        return (to_input * mask if ctx.needs_input_grad[0] else None), None, to_matrix, None


def _mask(kept: Tensor, x: Tensor, rate: float) -> Tensor:
    return kept.to(x.dtype) / (1.0 - rate)


Adapter = LoRA | ExpertAdapter
"""Both have A, B, `scaling` and `enabled`."""


def inject(model: nn.Module, targets: Sequence[LoRATarget], seed: int) -> None:
    """Give every target a LoRA child; they are the only trainable parameters afterwards.

    Raises:
        AdapterError: a target is not a Linear or the experts of the model, or has other sizes.
    """
    for target in targets:
        module = model.get_submodule(target.fqn)
        matrix = (target.out_features, target.in_features)
        if target.experts is None:
            if not isinstance(module, Linear) or tuple(module.weight.shape) != matrix:
                raise AdapterError("TT502", target.fqn, f"is not a linear map of shape {matrix}")
            module.lora = LoRA(target, seed).to(module.weight.device)
            continue
        parts = (2,) if target.experts.parts == 2 else ()
        shape = (target.experts.num_experts, *parts, *matrix)
        if not isinstance(module, DenseWeight | PackedWeight) or module.shape != shape:
            raise AdapterError("TT502", target.fqn, f"is not the experts of shape {shape}")
        module.lora = ExpertAdapter(target, seed).to(next(module.parameters()).device)


def lora_modules(model: nn.Module) -> dict[str, Adapter]:
    """LoRA children by the name of the module they sit on."""
    return {
        name.removesuffix(".lora"): module
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    }


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable tensors by logical name, such as `layers.0.self_attn.q_proj.lora.A`."""
    return {
        f"{name}.lora.{leaf}": parameter
        for name, module in lora_modules(model).items()
        for leaf, parameter in (("A", module.A), ("B", module.B))
    }


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Adapters, then the weights trained in full, by logical name."""
    return {**lora_parameters(model), **full_parameters(model)}


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The base model inside the block."""
    modules = list(lora_modules(model).values())
    for module in modules:
        module.enabled = False
    trained = [(module, put_back(module, frozen)) for _, module, frozen in full_modules(model)]
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True
        for full, weights in trained:
            put_back(full, weights)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Put everything trained into the base weights, in their storage dtype, and forget the rest.

    Raises:
        AdapterError: TT503, an adapter sits on packed experts, which cannot take it without loss.
    """
    adapters = lora_modules(model)
    for name in adapters:
        if isinstance(model.get_submodule(name), PackedWeight):
            raise AdapterError("TT503", name, "packed weights cannot take an adapter without loss",
                               hint="load the base in bf16 or fp32")
    merge_full(model)
    for name, module in adapters.items():
        parent = model.get_submodule(name)
        assert isinstance(parent, Linear | DenseWeight), f"{name} cannot take an adapter"
        add_delta(parent.weight, parent.weight, module)
        parent.lora = None


def add_delta(target: Tensor, weight: Tensor, adapter: Adapter) -> None:
    """target = weight + scaling * B A, added in at least float32, one expert at a time.

    Args:
        target: of the shape of `weight`, which it may be; rounded to its own dtype.
        weight: of the base.
        adapter: that of the same module.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    if isinstance(adapter, LoRA):
        target.copy_(weight.to(wide) + adapter.delta(wide))
        return
    for expert in range(len(weight)):
        target[expert].copy_(weight[expert].to(wide) + adapter.delta(expert, wide))
