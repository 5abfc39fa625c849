"""Missing gradients: an error where tokens arrived, a matter of time where none did."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from trimtab.arch.adapter import LoRATarget
from trimtab.errors import AdapterError
from trimtab.train.reach import Reach

Q, EXPERTS, PROJECTOR = "layers.0.self_attn.q_proj", "layers.0.mlp.experts.gate_up", "projector.proj.0"


def targets() -> list[LoRATarget]:
    return [
        LoRATarget(Q, 4, 4, 2, 2.0, 0.0, "kda", 0),
        LoRATarget(EXPERTS, 4, 4, 2, 2.0, 0.0, "routed_expert", 0),
        LoRATarget(PROJECTOR, 4, 4, 2, 2.0, 0.0, "projector", None),
    ]


def parameters() -> dict[str, Parameter]:
    shapes = {Q: (4, 2), EXPERTS: (3, 4, 2), PROJECTOR: (4, 2)}
    found = {}
    for name, shape in shapes.items():
        found[f"{name}.lora.A"] = Parameter(torch.ones(2, 4))
        found[f"{name}.lora.B"] = Parameter(torch.zeros(shape))
    return found


def give(parameters: dict[str, Parameter], name: str, expert: int | None = None) -> None:
    parameter = parameters[f"{name}.lora.B"]
    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    (parameter.grad if expert is None else parameter.grad[expert]).fill_(1.0)


def test_what_no_token_reached_is_listed_once_and_warned_about_after_check_steps() -> None:
    tensors = parameters()
    reach = Reach(tensors, targets(), check_steps=3, resumed=False)
    give(tensors, Q)
    give(tensors, EXPERTS, 1)
    (line,) = reach.after_step(0, saw_images=False)
    assert line.startswith("not yet reached: ")
    assert f"{EXPERTS}.lora.B (experts 0, 2)" in line and f"{PROJECTOR}.lora.B" in line
    give(tensors, EXPERTS, 0)
    assert reach.after_step(1, saw_images=False) == []
    (warning,) = reach.after_step(2, saw_images=False)
    assert warning.startswith("warning: 2 targets not reached after 3 steps") and "(experts 2)" in warning
    give(tensors, PROJECTOR)
    give(tensors, EXPERTS, 2)
    assert reach.after_step(3, saw_images=True) == [] and not reach.waiting


@pytest.mark.parametrize("silent", [Q, EXPERTS, PROJECTOR])
def test_a_module_that_tokens_reached_must_have_a_gradient(silent: str) -> None:
    tensors = parameters()
    for name in (Q, EXPERTS, PROJECTOR):
        if name != silent:
            give(tensors, name)
    reach = Reach(tensors, targets(), check_steps=3, resumed=False)
    with pytest.raises(AdapterError, match=rf"TT504.*{silent}"):
        reach.after_step(0, saw_images=True)


def test_after_a_resume_a_trained_b_counts_as_reached() -> None:
    tensors = parameters()
    with torch.no_grad():
        tensors[f"{EXPERTS}.lora.B"][2].fill_(0.1)
        tensors[f"{PROJECTOR}.lora.B"].fill_(0.1)
    reach = Reach(tensors, targets(), check_steps=30, resumed=True)
    assert reach.waiting == [f"{Q}.lora.B", f"{EXPERTS}.lora.B (experts 0, 1)"]
