"""Released names of Kimi-Linear-48B, and the module names transformers gives them in memory.

Knows: two tables. A_log is stored as [1, 1, H, 1]; routed experts are w1 (gate), w3 (up), w2
(down).
"""

from __future__ import annotations

from trimtab.arch.maps.rules import Rule, WeightMap

_LAYER = "model.layers.{i}."
_MOE = _LAYER + "block_sparse_moe."

_RULES = (
    Rule("embed.weight", "model.embed_tokens.weight"),
    Rule("lm_head.weight", "lm_head.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule(
        "layers.{i}.self_attn.A_log", _LAYER + "self_attn.A_log",
        transform="reshape", stored_shape=(1, 1, 0, 1),
    ),
    Rule("layers.{i}.mlp.router.{leaf}", _MOE + "gate.{leaf}"),
    Rule("layers.{i}.mlp.experts.gate_up", _MOE + "experts.{e}.w1", part="gate"),
    Rule("layers.{i}.mlp.experts.gate_up", _MOE + "experts.{e}.w3", part="up"),
    Rule("layers.{i}.mlp.experts.down", _MOE + "experts.{e}.w2", part="expert"),
    Rule("layers.{i}.mlp.shared_experts.{leaf}", _MOE + "shared_experts.{leaf}"),
    Rule("layers.{i}.{leaf}", _LAYER + "{leaf}"),
)

_MODULES = (
    Rule("layers.{i}.self_attn.f_{leaf}", _LAYER + "self_attn.forget_gate.f_{leaf}"),
    Rule("layers.{i}.mlp.router", _LAYER + "mlp.gate"),
    Rule("layers.{i}.mlp.experts", _LAYER + "mlp.experts"),
    Rule("layers.{i}.mlp.shared_experts.{leaf}", _LAYER + "mlp.shared_experts.{leaf}"),
)

# The inventory keeps conv, A_log, dt_bias, o_norm and the router bias in F32, which loses nothing
# of either file: tools that save this family round them to BF16 or keep everything in F32.
WEIGHT_MAP = WeightMap(rules=_RULES, module_rules=_MODULES, float_dtypes=("BF16", "F32"))
