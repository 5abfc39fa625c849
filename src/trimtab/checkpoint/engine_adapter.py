"""An adapter as inference engines read one: a single rank and a single scaling for all its matrices.

Engines take the scaling from `r` and `lora_alpha` alone and pass over `rank_pattern` and
`alpha_pattern`, so an adapter that has other values somewhere would be served with a wrong scaling
there. Narrower matrices are filled up with zeros, and B takes the quotient of the scalings.

Knows: factors. Does not know: files, names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.serving import servable
from trimtab.errors import AdapterError


def ignored(targets: Sequence[LoRATarget], engine: str) -> tuple[str, ...]:
    """Leaf names of targets that an engine is known not to apply, each with the reason."""
    found = {t.leaf: servable(engine, t.owner, t.leaf) for t in targets}
    return tuple(f"{leaf}: {it.reason}" for leaf, it in found.items() if it.answer == "no")


def for_engines(
    targets: Sequence[LoRATarget], tensors: Mapping[str, Tensor], where: str
) -> tuple[tuple[LoRATarget, ...], dict[str, Tensor]]:
    """The same adapter with one rank and one scaling.

    Args:
        targets: of the adapter.
        tensors: `{fqn}.lora.A` [..., rank, in] and `{fqn}.lora.B` [..., out, rank].
        where: the adapter, for errors.

    Returns:
        Targets and tensors, unchanged where they have the largest rank and its scaling already.

    Raises:
        AdapterError: TT503, it trains a module in full.
    """
    full = sorted(name for name in tensors if ".lora." not in name)
    if full:
        raise AdapterError(
            "TT503", where, f"has {full[0]} trained in full, and engines load pairs of A and B only",
            hint="merge it into its base, or export --to peft",
        )
    rank = max(t.rank for t in targets)
    scaling = next(t.scaling for t in targets if t.rank == rank)
    changed: dict[str, Tensor] = {}
    for target in targets:
        a, b = (tensors[f"{target.fqn}.lora.{side}"] for side in "AB")
        more = rank - target.rank
        if target.scaling != scaling:
            b = b * (target.scaling / scaling)
        changed[f"{target.fqn}.lora.A"] = pad(a, (0, 0, 0, more))
        changed[f"{target.fqn}.lora.B"] = pad(b, (0, more)).to(torch.float32)
    alike = tuple(
        replace(t, rank=rank, alpha=scaling * rank, use_rslora=False) for t in targets
    )
    return alike, changed
