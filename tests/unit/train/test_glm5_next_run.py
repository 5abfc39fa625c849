"""Adapters are trained on glm5_next, with and without images."""

from __future__ import annotations

from pathlib import Path

from tests.unit.train.test_images import image_recipe
from tests.unit.train.tiny_run import recipe_for, tiny_glm5_next, write_checkpoint
from trimtab.checkpoint.adapter import load_adapter
from trimtab.train.loop import finetune
from trimtab.train.plan import plan_run
from trimtab.train.reporter import SilentReporter


def test_text_and_images_are_trained_on(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config=tiny_glm5_next())
    text = recipe_for(tmp_path, model, "finetune.steps=2")
    assert finetune(text, SilentReporter()).passed
    (tmp_path / "images").mkdir()
    recipe = image_recipe(tmp_path / "images", model)
    assert finetune(recipe, SilentReporter()).passed
    adapter = load_adapter(tmp_path / "images/run/adapter", plan_run(recipe).arch)
    assert bool(adapter.tensors["projector.down_proj.lora.B"].any())
    assert bool(adapter.tensors["layers.1.self_attn.q_a_proj.lora.B"].any())
