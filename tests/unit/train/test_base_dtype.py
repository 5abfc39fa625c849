"""A base whose experts stay packed trains like one that was decoded, in a quarter of their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.train.test_loop import losses
from tests.unit.train.tiny_run import recipe_for
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.train.base_memory import base_memory
from trimtab.train.loop import finetune
from trimtab.train.reporter import SilentReporter


class Words(SilentReporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("experts", ["none", "per_expert"])
def test_packed_experts_give_the_losses_of_decoded_ones(
    tmp_path: Path, checkpoint: Path, experts: str
) -> None:
    """MXFP4 values are exact in bfloat16; the decoded base is a checkpoint of its own."""
    decoded = tmp_path / "decoded"
    copy_checkpoint(open_source(checkpoint), decoded, dtype="bf16")
    cases = {"native": (checkpoint, "native"), "bf16": (decoded, "bf16")}
    ratios = {}
    for name, (base, base_dtype) in cases.items():
        (tmp_path / name).mkdir()
        recipe = recipe_for(tmp_path / name, base, f"finetune.base_dtype={base_dtype}",
                            f"finetune.lora.experts={experts}", "finetune.steps=4")
        words = Words()
        assert finetune(recipe, words).passed
        (ratios[name],) = [line for line in words.lines if line.startswith("base in memory")]
    one, two = (tmp_path / name / "run" for name in cases)
    assert losses(one) == losses(two)
    a, b = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert ratios["native"].endswith("0.2656 of theirs")
    assert "1.000 of a bf16 base" in ratios["bf16"] and ratios["bf16"].endswith("1.0000 of theirs")


def test_the_bytes_of_a_base_are_counted_from_its_tensors(tmp_path: Path) -> None:
    config = preset_config("k3-tiny")
    init_checkpoint(load_arch(config, "t"), config, tmp_path / "m", 0)
    found = {}
    for dtype in ("native", "bf16", "fp32"):
        model, arch = load_model(tmp_path / "m", base_dtype=dtype)  # type: ignore[arg-type]
        found[dtype] = base_memory(model, arch)
        assert found[dtype].total == sum(p.nbytes for p in model.parameters())
    native, bf16, fp32 = found["native"], found["bf16"], found["fp32"]
    assert native.experts <= 0.27 * bf16.experts and bf16.experts == bf16.experts_bf16
    assert native.total_bf16 == bf16.total == bf16.total_bf16
    assert bf16.total - native.total == bf16.experts - native.experts
    assert fp32.experts == 2 * bf16.experts and fp32.total_bf16 == bf16.total
