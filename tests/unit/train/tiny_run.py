"""A checkpoint and data small enough to train in seconds, and recipes over them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.config.load import load_recipe
from trimtab.config.recipe import Recipe

WORDS = ("stared", "slushes", "milling", "truffles", "giggles", "boxes", "leaves", "geese")


def tiny_config() -> dict[str, Any]:
    """K3.1 at toy size: three KDA layers and one sparse MLA layer, four latent experts."""
    config = preset_config("k3.1-tiny")
    text = config["text_config"]
    text.update(
        hidden_size=32, num_hidden_layers=4, intermediate_size=32, q_lora_rank=16,
        kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_token=2,
        moe_intermediate_size=32, attn_res_block_size=2,
    )
    text["linear_attn_config"].update(
        kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=16
    )
    text["dsa_config"].update(index_n_heads=2, index_head_dim=8, index_topk=16)
    config["vision_config"].update(
        vt_hidden_size=8, mm_hidden_size=8, qkv_hidden_size=16, vt_intermediate_size=16,
        text_hidden_size=32,
    )
    return config


def tiny_glm5_next() -> dict[str, Any]:
    """GLM-5.3-Flash at toy size: two KDA and two sparse layers, four experts, a tower."""
    config = preset_config("glm5-next-tiny")
    kinds = ["linear_attention", "deepseek_sparse_attention"] * 2
    text = config["text_config"]
    text.update(
        hidden_size=32, num_hidden_layers=4, intermediate_size=32, q_lora_rank=16,
        kv_lora_rank=32, qk_nope_head_dim=8, qk_head_dim=8, v_head_dim=8, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, index_head_dim=8,
        index_topk=16, layer_types=kinds, indexer_types=["full"] * 4,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
    )
    text["linear_attn_config"].update(
        kda_layers=[0, 2], full_attn_layers=[1, 3], num_heads=2, head_dim=16
    )
    config["vision_config"].update(
        depth=1, hidden_size=16, intermediate_size=16, out_hidden_size=32,
        projection_intermediate_size=24,
    )
    return config


def write_checkpoint(
    directory: Path, seed: int = 0, config: dict[str, Any] | None = None
) -> Path:
    """Random weights in the released format, with the demo's tokenizer and template."""
    config = tiny_config() if config is None else config
    base = files("trimtab.demo") / "base"
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    extra = {name: (base / name).read_bytes() for name in names}
    init_checkpoint(load_arch(config, "tiny"), config, directory, seed, extra_files=extra)
    return directory


def write_data(directory: Path) -> tuple[Path, Path]:
    """A domain file of questions and a general file of texts."""
    domain, general = directory / "domain.jsonl", directory / "general.jsonl"
    rows = [{"prompt": f"lemma: {w} {i}", "completion": w[:4]} for i in range(6) for w in WORDS]
    domain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"{i}. The word {w} stands here, and nothing is said of it."}
             for i in range(3) for w in WORDS]  # fmt: skip
    general.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return domain, general


def write_recipe(directory: Path, model: Path, *, output: Path, extra: str = "") -> Path:
    """A recipe of 6 steps of 2 micro-batches of 2 packs, saved every 2 steps."""
    domain, general = write_data(directory)
    path = directory / "recipe.yaml"
    path.write_text(f"""\
model: {{path: {model}}}
finetune:
  steps: 6
  lora: {{rank: 4, alpha: 8, dropout: 0.1, target_modules: [attention, shared_experts]}}
  optimizer: {{lr: 1.0e-2}}
  batch: {{tokens_per_step: 256, micro_batch_tokens: 128}}
  data: {{domain: {{path: {domain}}}, general: {{path: {general}}}, max_seq_len: 64}}
checkpoint: {{every_steps: 2, keep: 2}}
output: {output}
{extra}""")
    return path


def recipe_for(directory: Path, model: Path, *overrides: str) -> Recipe:
    """`write_recipe` read back, with output `directory/run`."""
    path = write_recipe(directory, model, output=directory / "run")
    return load_recipe(path, overrides)
