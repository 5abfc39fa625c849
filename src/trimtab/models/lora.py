"""LoRA on the model's Linear modules: y += scaling * B A dropout(x).

A and B are float32 and their own masters. No random state: the initial A follows from
(seed, module name), a dropout mask from (seed, step, module name, global token number, feature),
so that any layout, and recomputation, sees the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trimtab.arch.adapter import LoRATarget
from trimtab.errors import AdapterError
from trimtab.models.context import ForwardContext
from trimtab.models.full import full_modules, full_parameters, merge_full, put_back
from trimtab.models.linear import Linear
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
            x = x * self._dropout_mask(x, ctx)
        return linear(linear(x, self.A), self.B) * self.scaling

    def delta(self) -> Tensor:
        """scaling * B A, [out, in] float32."""
        if not self.enabled:
            return torch.zeros(self.B.shape[0], self.A.shape[1])
        return (self.B @ self.A) * self.scaling

    def _dropout_mask(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        if ctx.dropout is None or ctx.token_ids is None:
            raise ValueError("dropout needs the global token numbers of the pack")
        key = name_seed(ctx.dropout.seed, f"{ctx.dropout.step}/{self.fqn}")
        kept = keep_mask(ctx.token_ids, x.shape[-1], key, self.dropout)
        return kept.to(x.dtype) / (1.0 - self.dropout)


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on `seed` and `name` only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def inject(model: nn.Module, targets: Sequence[LoRATarget], seed: int) -> None:
    """Give every target a LoRA child; they are the only trainable parameters afterwards.

    Raises:
        AdapterError: a target is not a Linear of the model or has other sizes.
    """
    for target in targets:
        module = model.get_submodule(target.fqn)
        shape = (target.out_features, target.in_features)
        if not isinstance(module, Linear) or tuple(module.weight.shape) != shape:
            raise AdapterError("TT502", target.fqn, f"is not a linear map of shape {shape}")
        module.lora = LoRA(target, seed).to(module.weight.device)


def lora_modules(model: nn.Module) -> dict[str, LoRA]:
    """LoRA children by the name of the Linear they sit on."""
    return {
        name.removesuffix(".lora"): module
        for name, module in model.named_modules()
        if isinstance(module, LoRA)
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
    """Put everything trained into the base weights, in their storage dtype, and forget the rest."""
    merge_full(model)
    for name, module in lora_modules(model).items():
        parent = model.get_submodule(name)
        assert isinstance(parent, Linear), f"{name} holds a LoRA child but is no Linear"
        wide = torch.promote_types(parent.weight.dtype, torch.float32)
        parent.weight.copy_(parent.weight.to(wide) + module.delta().to(wide))
        parent.lora = None
