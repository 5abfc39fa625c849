"""Every tiny preset: merged weights compute what base + adapter computes, experts included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config, preset_names
from trimtab.checkpoint.adapter import AdapterMeta, save_adapter
from trimtab.checkpoint.init import init_checkpoint
from trimtab.verify.merged import merge_checked

TINY = [name for name in preset_names() if name.endswith("-tiny")]


# Slow: nine times the weights of a preset are written and loaded again.
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_merged_logits_stay_within_the_tolerance_table(tmp_path: Path, name: str) -> None:
    config = preset_config(name)
    arch = load_arch(config)
    init_checkpoint(arch, config, tmp_path / "m", seed=1)
    words = ["attention", "dense_ffn", "shared_experts"]
    targets = resolve_targets(arch, target_modules=words, rank=4, alpha=8, experts="per_expert")
    draw = torch.Generator().manual_seed(3)
    tensors = {
        f"{t.fqn}.lora.{side}": 0.1 * torch.randn(t.shape(side), generator=draw)
        for t in targets for side in "AB"
    }
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta(str(tmp_path / "m")))
    for dtype in ("native", "bf16", "fp32"):
        report = merge_checked(tmp_path / "m", tmp_path / "a", tmp_path / dtype, dtype=dtype)  # type: ignore[arg-type]
        assert all(v.passed for v in report.verdicts), (dtype, [str(v) for v in report.verdicts])
        judged = [v for v in report.verdicts if v.name.startswith("merge error as a share")]
        assert [v.limit for v in judged] == [0.5], "the adapter must matter"
