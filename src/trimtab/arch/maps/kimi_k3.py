"""Released names of Kimi K3 and K3.1.

Knows: one table. The names carry `language_model.`; A_log has a zero tail; routed experts are
w1 (gate), w3 (up), w2 (down).
"""

from __future__ import annotations

from trimtab.arch.maps.rules import Rule, WeightMap

_TOP = "language_model."
_LAYER = "language_model.model.layers.{i}."
_MOE = _LAYER + "block_sparse_moe."
_TOWER = "vision_tower."

WEIGHT_MAP = WeightMap(rules=(
    Rule("embed.weight", _TOP + "model.embed_tokens.weight"),
    Rule("lm_head.weight", _TOP + "lm_head.weight"),
    Rule("norm.weight", _TOP + "model.norm.weight"),
    Rule("output_attn_res_{leaf}", _TOP + "model.output_attn_res_{leaf}"),
    Rule("layers.{i}.self_attn.A_log", _LAYER + "self_attn.A_log", transform="pad_tail"),
    Rule("layers.{i}.mlp.router.{leaf}", _MOE + "gate.{leaf}"),
    Rule("layers.{i}.mlp.latent_down.{leaf}", _MOE + "routed_expert_down_proj.{leaf}"),
    Rule("layers.{i}.mlp.latent_norm.{leaf}", _MOE + "routed_expert_norm.{leaf}"),
    Rule("layers.{i}.mlp.latent_up.{leaf}", _MOE + "routed_expert_up_proj.{leaf}"),
    Rule("layers.{i}.mlp.experts.gate_up", _MOE + "experts.{e}.w1", part="gate"),
    Rule("layers.{i}.mlp.experts.gate_up", _MOE + "experts.{e}.w3", part="up"),
    Rule("layers.{i}.mlp.experts.down", _MOE + "experts.{e}.w2", part="expert"),
    Rule("layers.{i}.mlp.shared_experts.{leaf}", _MOE + "shared_experts.{leaf}"),
    Rule("layers.{i}.{leaf}", _LAYER + "{leaf}"),
    Rule("vision.blocks.{leaf}", _TOWER + "encoder.blocks.{leaf}"),
    Rule("vision.final_layernorm.{leaf}", _TOWER + "encoder.final_layernorm.{leaf}"),
    Rule("vision.{leaf}", _TOWER + "{leaf}"),
    Rule("projector.{leaf}", "mm_projector.{leaf}"),
))
