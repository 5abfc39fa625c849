"""Dropout of an adapter: the numbers of the plain formula, without a second input per adapter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trimtab.arch.adapter import LoRATarget
from trimtab.models.context import DropoutKey, ForwardContext
from trimtab.models.lora import LoRA
from trimtab.ops.dropout import keep_mask
from trimtab.ops.precision import linear

T, IN, OUT, RANK, RATE = 64, 96, 32, 4, 0.25


def adapter(name: str, dropout: float = RATE) -> LoRA:
    lora = LoRA(LoRATarget(name, IN, OUT, RANK, 8.0, dropout, "kda", 0), seed=3)
    with torch.no_grad():
        lora.B.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return lora


def context() -> ForwardContext:
    return ForwardContext.packed([T], token_ids=torch.arange(100, 100 + T), dropout=DropoutKey(7, 2))


def plain(lora: LoRA, x: Tensor) -> Tensor:
    from trimtab.models.seeds import name_seed

    kept = keep_mask(torch.arange(100, 100 + T), IN, name_seed(7, f"2/{lora.fqn}"), RATE)
    return linear(linear(x * (kept.to(x.dtype) / (1 - RATE)), lora.A), lora.B) * lora.scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_and_gradients_are_those_of_the_plain_formula(dtype: torch.dtype) -> None:
    lora, found = adapter("q_proj"), []
    start = torch.randn(T, IN, generator=torch.Generator().manual_seed(5)).to(dtype)
    weights = torch.randn(T, OUT, generator=torch.Generator().manual_seed(6)).to(dtype)
    for forward in (lambda x: lora(x, context()), lambda x: plain(lora, x)):
        x = start.clone().requires_grad_()
        y = forward(x)
        found.append((y, *torch.autograd.grad((y * weights).sum(), (x, lora.A, lora.B))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], adapter("q_proj", 0.0)(start, context()))


def test_an_input_without_gradient_still_trains_the_adapter() -> None:
    lora = adapter("q_proj")
    lora(torch.randn(T, IN), context()).sum().backward()
    assert lora.A.grad is not None and bool(lora.A.grad.any())


def test_adapters_on_one_input_keep_it_once_and_a_byte_per_element_each() -> None:
    loras = [adapter(name) for name in ("q_proj", "k_proj", "v_proj")]
    x = torch.randn(T, IN, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [lora(x, context()) for lora in loras]
    matrices = sum(lora.A.nbytes + lora.B.nbytes for lora in loras)
    inner = len(loras) * T * RANK * 4
    assert sum(saved.values()) == x.nbytes + len(loras) * T * IN + matrices + inner
    assert len(outputs) == 3
