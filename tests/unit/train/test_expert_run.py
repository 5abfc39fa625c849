"""A run that trains adapters on routed experts: resumed, checked, read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.train.test_loop import KillAfter, Killed, losses
from tests.unit.train.tiny_run import recipe_for
from trimtab.arch.load import load_arch
from trimtab.checkpoint.adapter import load_adapter
from trimtab.train.loop import finetune
from trimtab.train.reporter import SilentReporter


@pytest.mark.parametrize(
    ("layout", "base_dtype", "rank"), [("per_expert", "native", 4), ("shared_outer", "bf16", 2)]
)
def test_adapters_on_experts_are_trained_resumed_and_read_back(
    tmp_path: Path, checkpoint: Path, layout: str, base_dtype: str, rank: int
) -> None:
    overrides = (
        f"finetune.lora.experts={layout}", f"finetune.base_dtype={base_dtype}", "finetune.steps=3",
        f"finetune.lora.moe_rank_scaling={'true' if rank == 2 else 'false'}",
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = finetune(recipe_for(tmp_path / "a", checkpoint, *overrides), SilentReporter())
    assert whole.passed
    broken = recipe_for(tmp_path / "b", checkpoint, *overrides)
    with pytest.raises(Killed):
        finetune(broken, KillAfter(3))
    assert finetune(broken, SilentReporter()).resumed_from == 2
    one, two = (tmp_path / n / "run" for n in "ab")
    assert losses(one) == losses(two)
    first, second = (load_file(r / "adapter" / "adapter_model.safetensors") for r in (one, two))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    arch = load_arch(json.loads((checkpoint / "config.json").read_text()), "t")
    adapter = load_adapter(one / "adapter", arch)
    experts = [t for t in adapter.targets if t.experts is not None]
    assert {(t.experts.layout, t.rank, t.scaling) for t in experts} == {(layout, rank, 2.0)}
    moved = [n for n, t in adapter.tensors.items() if n.endswith("lora.B") and ".experts." in n and t.any()]
    assert len(moved) == len(experts)
