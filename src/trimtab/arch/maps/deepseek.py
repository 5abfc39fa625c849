"""Released names of DeepSeek-V3, DeepSeek-V3.2, Kimi K2 and GLM-5: one table for all.

Knows: one table. Experts are stored one by one under `mlp.experts`; module names in memory are the
released ones. MTP layers are numbered after the others and repeat input table and head in the
DeepSeek releases.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.arch.maps.rules import Rule, WeightMap

_LAYER = "model.layers.{i}."
_EXPERT = _LAYER + "mlp.experts.{e}."

_RULES = (
    Rule("embed.weight", "model.embed_tokens.weight"),
    Rule("lm_head.weight", "lm_head.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule("layers.{i}.mlp.router.{leaf}", _LAYER + "mlp.gate.{leaf}"),
    Rule("layers.{i}.mlp.experts.gate_up", _EXPERT + "gate_proj", part="gate"),
    Rule("layers.{i}.mlp.experts.gate_up", _EXPERT + "up_proj", part="up"),
    Rule("layers.{i}.mlp.experts.down", _EXPERT + "down_proj", part="expert"),
    Rule("layers.{i}.{leaf}", _LAYER + "{leaf}"),
)
# The in-memory name of the router is its released one; the rule keeps `.gate` without `.weight`.
_MODULES = (Rule("layers.{i}.mlp.router", _LAYER + "mlp.gate"),)
# PEFT turns these names into the joined experts for the families that transformers once loaded
# with one module per expert.
_PEFT_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_NEVER_QUANTISED = ("model.layers.*.indexer.weights_proj", "model.layers.*.eh_proj")

# The releases keep the router's bias and the indexer's key norm in F32 or BF16, tools that save
# these families keep all in one dtype; neither loses anything.
WEIGHT_MAP = WeightMap(
    rules=_RULES, module_rules=_MODULES, float_dtypes=("BF16", "F32"),
    never_quantised=_NEVER_QUANTISED, peft_experts=_PEFT_EXPERTS,
)
WITH_MTP_TABLES = replace(WEIGHT_MAP, mtp_tables=True)
