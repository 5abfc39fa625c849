"""Runs on images: what of the projector is trained, what is said, what is left behind."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.train.tiny_run import recipe_for
from trimtab.checkpoint.adapter import attach_adapter, load_adapter
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError
from trimtab.train.loop import finetune
from trimtab.train.plan import plan_run
from trimtab.train.reporter import SilentReporter


class Listener(SilentReporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def png(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (28, 56, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def image_recipe(directory: Path, checkpoint: Path, *overrides: str) -> Recipe:
    """The toy run with two records in three on images."""
    recipe_for(directory, checkpoint)
    rows = []
    for n in range(12):
        parts = [{"type": "image", "base64": png(n)}, {"type": "text", "text": "digit:"}]
        content = f"word {n}" if n % 3 == 2 else parts
        rows.append({"prompt": content, "completion": str(n % 10)})
    (directory / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe_for(
        directory, checkpoint, f"finetune.data.domain.path={directory / 'images.jsonl'}",
        "finetune.steps=2", *overrides,
    )


def test_lora_on_the_projector_is_the_default_with_images(tmp_path: Path, checkpoint: Path) -> None:
    said = Listener()
    result = finetune(image_recipe(tmp_path, checkpoint), said)
    assert result.passed, result.verdicts
    adapter = load_adapter(tmp_path / "run/adapter", plan_run(image_recipe(tmp_path, checkpoint)).arch)
    assert bool(adapter.tensors["projector.proj.2.lora.B"].any())
    assert bool(adapter.tensors["projector.proj.0.lora.B"].any())
    (line,) = [text for text in said.lines if text.startswith("image features")]
    assert "float32 [" in line and "weights in bfloat16" in line
    assert "2 x 2 patches, row by row" in line and "placeholders = image tokens of" in line


def test_full_training_is_saved_and_merges(tmp_path: Path, checkpoint: Path) -> None:
    result = finetune(image_recipe(tmp_path, checkpoint, "finetune.vision.projector=full"),
                      SilentReporter())
    assert result.passed, result.verdicts
    base, arch = load_model(checkpoint)
    adapter = load_adapter(tmp_path / "run/adapter", arch)
    moved = base.get_parameter("projector.post_norm.weight").float()
    assert not torch.equal(adapter.tensors["projector.post_norm.weight"], moved)
    copy_checkpoint(open_source(checkpoint), tmp_path / "merged", adapter=adapter)
    merged, _ = load_model(tmp_path / "merged")
    attach_adapter(base, adapter)
    for name in ("projector.proj.0.weight", "projector.post_norm.weight"):
        assert torch.equal(merged.get_parameter(name), base.get_parameter(name).bfloat16())


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_resumed_run_with_images_is_the_same_bit_for_bit(
    tmp_path: Path, checkpoint: Path, mode: str
) -> None:
    word = f"finetune.vision.projector={mode}"
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            recipe = image_recipe(tmp_path, checkpoint, word, f"output={tmp_path / name}",
                                  "finetune.optimizer.scheduler=constant",
                                  "finetune.optimizer.warmup_ratio=0", f"finetune.steps={count}")
            finetune(recipe, SilentReporter())
    one, two = (tmp_path / n / "adapter/adapter_model.safetensors" for n in ("whole", "parts"))
    assert one.read_bytes() == two.read_bytes()


def test_text_alone_trains_nothing_of_vision_and_says_so(tmp_path: Path, checkpoint: Path) -> None:
    plan = plan_run(recipe_for(tmp_path, checkpoint))
    assert not plan.vision and not any(t.owner == "projector" for t in plan.targets)
    assert any("no images" in note for note in plan.table.notes)
    frozen = plan_run(image_recipe(tmp_path, checkpoint, "finetune.vision.projector=frozen"))
    assert frozen.vision and not any(t.owner == "projector" for t in frozen.targets)
    full = plan_run(image_recipe(tmp_path, checkpoint, "finetune.vision.projector=full"))
    assert full.table.rows[-1].kind == "full"
    assert full.table.num_parameters == frozen.table.num_parameters + sum(
        p.numel for p in full.full
    )


@pytest.mark.parametrize("mode", ["frozen", "full"])
def test_targets_that_contradict_the_projectors_mode_are_refused(
    tmp_path: Path, checkpoint: Path, mode: str
) -> None:
    words = "finetune.lora.target_modules=[attention, projector]"
    with pytest.raises(ConfigError, match=f"projector is {mode}"):
        plan_run(image_recipe(tmp_path, checkpoint, words, f"finetune.vision.projector={mode}"))


def test_a_rate_for_the_projector_applies_to_it_alone(tmp_path: Path, checkpoint: Path) -> None:
    rate = "finetune.optimizer.lr_by_branch={projector: 1.0e-9}"
    finetune(image_recipe(tmp_path, checkpoint, rate), SilentReporter())
    arch = plan_run(image_recipe(tmp_path, checkpoint)).arch
    tensors = load_adapter(tmp_path / "run/adapter", arch).tensors
    assert float(tensors["projector.proj.2.lora.B"].abs().max()) < 1e-7
    assert float(tensors["layers.0.self_attn.q_proj.lora.B"].abs().max()) > 1e-4
