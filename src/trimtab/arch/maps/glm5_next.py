"""Released names of GLM-5.3-Flash, and the module names transformers gives them in memory.

Knows: two tables. The names carry `language_model.`; the mixing weights of a block stand on the
layer; the merger is part of the tower.
"""

from __future__ import annotations

from trimtab.arch.maps.rules import Rule, WeightMap

_TEXT = "model.language_model."
_LAYER = "model.language_model.layers.{i}."
_EXPERT = _LAYER + "mlp.experts.{e}."
_TOWER = "model.visual."

_RULES = (
    Rule("embed.weight", _TEXT + "embed_tokens.weight"),
    Rule("lm_head.weight", "lm_head.weight"),
    Rule("norm.weight", _TEXT + "norm.weight"),
    Rule("layers.{i}.hc_attn.{leaf}", _LAYER + "hc_attn_{leaf}"),
    Rule("layers.{i}.hc_ffn.{leaf}", _LAYER + "hc_ffn_{leaf}"),
    Rule("layers.{i}.mlp.router.{leaf}", _LAYER + "mlp.gate.{leaf}"),
    Rule("layers.{i}.mlp.experts.gate_up", _EXPERT + "gate_proj", part="gate"),
    Rule("layers.{i}.mlp.experts.gate_up", _EXPERT + "up_proj", part="up"),
    Rule("layers.{i}.mlp.experts.down", _EXPERT + "down_proj", part="expert"),
    Rule("layers.{i}.{leaf}", _LAYER + "{leaf}"),
    Rule("projector.{leaf}", _TOWER + "merger.{leaf}"),
    Rule("vision.{leaf}", _TOWER + "{leaf}"),
)

_MODULES = (
    Rule("layers.{i}.self_attn.f_{leaf}", _LAYER + "self_attn.forget_gate.f_{leaf}"),
)

# The plain release is BF16 with A_log, dt_bias, router bias, base and scale in F32; what transformers
# saves keeps the convolutions in F32 too, or everything in one dtype.
WEIGHT_MAP = WeightMap(
    rules=_RULES, module_rules=_MODULES, float_dtypes=("BF16", "F32"),
    never_quantised=tuple(
        f"{_TEXT}layers.*.{module}"
        for module in ("self_attn.kv_b_proj", "self_attn.indexer.*", "eh_proj")
    ),
)
