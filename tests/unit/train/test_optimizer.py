from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.params import Owner
from trimtab.errors import ConfigError
from trimtab.train.optimizer import OptimizerOptions, build_optimizer, set_learning_rate


def target(fqn: str, owner: Owner) -> LoRATarget:
    return LoRATarget(fqn, 4, 4, 2, 4.0, 0.0, owner, 0)


TARGETS = [target("a.q_proj", "kda"), target("b.o_proj", "mla"), target("c.up_proj", "dense_ffn")]


def parameters() -> dict[str, Parameter]:
    return {f"{t.fqn}.lora.{m}": Parameter(torch.ones(2, 4)) for t in TARGETS for m in "AB"}


def rates(options: OptimizerOptions) -> dict[str, float]:
    named = parameters()
    optimizer = build_optimizer(named, TARGETS, options)
    by_id = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert len(by_id) == len(named)
    return {name: by_id[id(p)] for name, p in named.items()}


def test_each_parameter_is_in_one_group_at_the_base_rate() -> None:
    assert set(rates(OptimizerOptions(1e-4, {})).values()) == {1e-4}


def test_a_branch_rate_overrides_and_b_has_its_ratio() -> None:
    got = rates(OptimizerOptions(1e-4, {"sparse_attention": 5e-5}, lora_b_lr_ratio=4.0))
    assert got["b.o_proj.lora.A"] == 5e-5 and got["b.o_proj.lora.B"] == 2e-4
    assert got["a.q_proj.lora.A"] == 1e-4 and got["c.up_proj.lora.B"] == 4e-4


def test_attention_names_both_branches_unless_one_is_named() -> None:
    got = rates(OptimizerOptions(1e-4, {"attention": 3e-5, "linear_attention": 2e-5}))
    assert got["a.q_proj.lora.A"] == 2e-5 and got["b.o_proj.lora.A"] == 3e-5


def test_a_branch_without_adapters_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"lr_by_branch\.projector"):
        build_optimizer(parameters(), TARGETS, OptimizerOptions(1e-4, {"projector": 1e-5}))


def test_the_schedule_scales_initial_rates_not_the_last_ones() -> None:
    optimizer = build_optimizer(parameters(), TARGETS, OptimizerOptions(1e-4, {}))
    set_learning_rate(optimizer, 0.5)
    set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-5}
