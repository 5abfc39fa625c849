"""The whole job on a toy model of each rotated-MLA family: init, finetune, evaluate, merge, dump."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.train.tiny_run import write_recipe
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.cli.init import _tokenizer_files
from trimtab.cli.main import run

TOY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_n_heads": 8,
    "index_head_dim": 8, "index_topk": 16,
}
GLM: dict[str, Any] = {
    "indexer_types": ["full", "shared", "full"], "index_topk_freq": None, "qk_head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}


def toy_config(preset: str) -> dict[str, Any]:
    return preset_config(preset) | TOY | (GLM if preset.startswith("glm") else {})


@pytest.mark.parametrize("preset", ["deepseek-v3.2-tiny", "glm-5-tiny"])
def test_from_random_weights_to_a_merged_model(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, model = toy_config(preset), tmp_path / "model"
    files = _tokenizer_files(preset)
    init_checkpoint(load_arch(config), config, model, seed=1, extra_files=files)
    held_out = f"""\
evaluate:
  domain: [{{path: {tmp_path}/domain.jsonl, limit: 2, max_new_tokens: 2}}]
  general: [{{path: {tmp_path}/general.jsonl, limit: 2}}]
  gate: {{min_domain_gain: -1.0, max_general_loss: 1.0}}"""
    recipe = write_recipe(tmp_path, model, output=tmp_path / "run", extra=held_out)

    assert run(["finetune", str(recipe), "--json", "--set", "finetune.steps=2"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 2 and "q_a_proj" in captured.err
    adapter = tmp_path / "run" / "adapter"
    tensors = load_file(adapter / "adapter_model.safetensors")
    trained = {n for n, t in tensors.items() if n.endswith("lora_B.weight") and t.any()}
    assert trained and not any("indexer" in name for name in tensors)
    assert {n for n in tensors if n.endswith("lora_B.weight")} == trained

    assert run(["evaluate", str(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True

    merged = tmp_path / "merged"
    command = ["merge", str(model), str(adapter), "--out", str(merged)]
    if preset.startswith("deepseek"):  # FP8's rounding shows in the logits
        assert run([*command, "--max-logits-error", "0.1"]) == 1
        assert "FAIL" in (said := capsys.readouterr().out) and "--dtype bf16" in said
        command += ["--dtype", "bf16"]
    assert run(command) == 0
    capsys.readouterr()

    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps({"sequences": [list(range(5, 45))]}))
    dump = ["verify", "dump", str(merged), "--input-ids", str(ids), "--out", str(tmp_path / "dump")]
    assert run([*dump, "--dtype", "float64"]) == 0
    found = load_file(tmp_path / "dump" / "tensors.safetensors")
    assert found["logits.0"].shape == (40, 320) and torch.isfinite(found["logits.0"]).all()
    assert {f"hidden.0.{layer}" for layer in range(3)} <= set(found)
