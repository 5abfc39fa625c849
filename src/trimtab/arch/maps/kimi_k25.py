"""Released names of Kimi K2.5: those of Kimi K2 below `language_model.`, beside the tower's.

Knows: two tables. Tower and projector are carried along in the files.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.arch.maps import deepseek
from trimtab.arch.maps.rules import Rule, WeightMap

_RULES = tuple(
    replace(rule, stored=f"language_model.{rule.stored}") for rule in deepseek.WEIGHT_MAP.rules
)
# transformers holds the text model as `model.language_model`, the head beside it.
_MODULES = (
    Rule("layers.{i}.mlp.router", "model.language_model.layers.{i}.mlp.gate"),
    Rule("layers.{i}.{leaf}", "model.language_model.layers.{i}.{leaf}"),
    Rule("lm_head", "lm_head"),
)

WEIGHT_MAP = WeightMap(
    rules=_RULES, module_rules=_MODULES, float_dtypes=deepseek.WEIGHT_MAP.float_dtypes,
    carried=("vision_tower.", "mm_projector."),
)
