"""The first operation that is not finite is named, in the forward and in the backward pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.unit.train.test_step import adapted, packs, step
from trimtab.errors import RunError
from trimtab.models.lora import lora_parameters
from trimtab.train.nan_guard import first_fault


class Root(nn.Module):
    """sqrt(x - shift): NaN below zero, an infinite gradient at zero."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        masked = torch.where(x > 1e9, x, torch.tensor(-torch.inf)).exp()  # masks are no fault
        return (x - self.shift).sqrt() + masked


def model(shift: float) -> nn.Sequential:
    first = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(2))
    return nn.Sequential(first, Root(shift), nn.Linear(2, 1, bias=False))


@pytest.mark.parametrize(
    ("shift", "place"),
    [(2.0, r"^module 1, operation aten\.sqrt"), (1.0, r"^backward pass at module 1, operation aten\.")],
)
def test_the_first_fault_is_named_with_module_and_operation(shift: float, place: str) -> None:
    net = model(shift)

    def run() -> None:
        net(torch.ones(1, 2)).sum().backward()

    assert re.search(place, first_fault(net, list(net.parameters()), run))
    assert all(p.grad is None for p in net.parameters())


def test_a_sound_run_and_a_broken_parameter_are_told_apart() -> None:
    net = model(0.0)

    def run() -> None:
        net(torch.ones(1, 2)).sum().backward()

    assert first_fault(net, list(net.parameters()), run).startswith("no single operation")
    with torch.no_grad():
        net[2].weight.fill_(torch.nan)
    assert first_fault(net, list(net.parameters()), run) == "2.weight itself is not finite"


def test_a_step_names_the_layer(tmp_path: Path, checkpoint: Path) -> None:
    tuned = adapted(checkpoint)
    batch = packs(tmp_path, checkpoint, 1)
    with torch.no_grad():  # finite, but not once it is multiplied
        tuned.get_submodule("layers.1.post_attention_layernorm").weight.fill_(1e308)
    with pytest.raises(RunError, match=r"(?s)TT602.*step 1.*module layers\.1\.\S+, operation"):
        step(tuned, batch, 64)
    result, _ = step(tuned, batch, 64, on_nan="skip", recompute="layer")
    assert result.skipped and result.fault is not None and "layers.1." in result.fault
    assert all(p.grad is None for p in lora_parameters(tuned).values())
