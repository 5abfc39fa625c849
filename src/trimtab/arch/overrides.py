"""Rank and alpha of single groups of LoRA targets.

Knows: targets and the words that name groups of them. Does not know: recipes, torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.arch.adapter import GROUPS, LoRATarget
from trimtab.arch.spec import ArchSpec, MoESpec
from trimtab.errors import AdapterError


@dataclass(frozen=True, slots=True)
class Override:
    """What replaces rank and alpha; None keeps the rank, or the scaling."""

    rank: int | None = None
    alpha: float | None = None


def apply_overrides(
    targets: Sequence[LoRATarget], overrides: Mapping[str, Override]
) -> tuple[LoRATarget, ...]:
    """Targets with the rank and alpha of the narrowest group word that covers them.

    An alpha that is not given moves with the rank so that the scaling stays.

    Args:
        targets: with the ranks of the whole adapter.
        overrides: by group word, or `routed_experts`.

    Raises:
        AdapterError: TT501 where a word covers no target.
    """
    words = {target.fqn: _word(target, overrides) for target in targets}
    unused = sorted(set(overrides) - set(words.values()))
    if unused:
        branches = ", ".join(sorted({target.branch for target in targets}))
        raise AdapterError("TT501", f"finetune.lora.overrides.{unused[0]}", "covers no target",
                           hint=f"groups with targets that no narrower word covers: {branches}")
    return tuple(
        target if word is None else _overridden(target, overrides[word])
        for target in targets
        for word in (words[target.fqn],)
    )


def scale_expert_ranks(arch: ArchSpec, targets: Sequence[LoRATarget]) -> tuple[LoRATarget, ...]:
    """Routed experts at rank / active experts per token, rounded down and at least 1."""
    active = {
        index: layer.ffn.top_k
        for index, layer in enumerate(arch.layers) if isinstance(layer.ffn, MoESpec)
    }
    return tuple(
        _overridden(t, Override(max(1, t.rank // active[t.layer])))
        if t.owner == "routed_expert" and t.layer is not None else t
        for t in targets
    )


def _word(target: LoRATarget, overrides: Mapping[str, Override]) -> str | None:
    if target.branch in overrides:
        return target.branch
    covering = (word for word, owners in GROUPS.items() if target.owner in owners)
    return next((word for word in covering if word in overrides), None)


def _overridden(target: LoRATarget, override: Override) -> LoRATarget:
    rank = target.rank if override.rank is None else override.rank
    alpha = override.alpha
    if alpha is None:
        alpha = target.scaling * (math.sqrt(rank) if target.use_rslora else rank)
    return replace(target, rank=rank, alpha=alpha)
