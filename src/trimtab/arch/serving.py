"""Which LoRA targets an inference engine serves, before anything is trained for it.

Knows: engines and kinds of modules. Does not know: recipes, torch, the engines' code. `no` stands
only where the engine is known to ignore the target; what nobody has shown to work is `unproven`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.arch.params import Owner

Answer = Literal["yes", "unproven", "no"]
_PROVEN: tuple[Owner, ...] = ("kda", "mla", "dense_ffn", "shared_expert")


@dataclass(frozen=True, slots=True)
class Servable:
    """Whether an engine applies the adapter of a target, and why not."""

    answer: Answer
    reason: str = ""


def servable(engine: str, owner: Owner, leaf: str) -> Servable:
    """Whether an engine applies the adapter of such a target.

    Args:
        engine: `trimtab`, `vllm`, `sglang` or `vllm-ascend`.
        owner: kind of module.
        leaf: last part of its name.
    """
    if engine == "trimtab":
        return Servable("yes")
    if owner == "mla" and leaf == "kv_b_proj":
        return Servable("no", "its attention absorbs this matrix and reads the base weight")
    if owner == "router":
        return Servable("no", "it loads adapters, not routers that were trained; merge instead")
    if owner == "routed_expert":
        return Servable("unproven", "loaders have dropped adapters of fused experts without a "
                        "word; compare an answer with and without the adapter, or merge")
    if owner not in _PROVEN:
        return Servable("unproven", "compare an answer with and without the adapter, or merge")
    return Servable("yes")
