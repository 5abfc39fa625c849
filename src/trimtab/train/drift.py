"""Router drift: how far the adapter moves the routing of fixed tokens away from the base's.

    p = scores / sum(scores);   drift of a layer = mean over tokens of KL(p_base || p_adapted)

Knows: routers and the scores they compute. Does not know: recipes, why routing moves.

Shape letters: T tokens, E experts, A active experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import disabled
from trimtab.models.moe import Router
from trimtab.models.tape import ChoiceTape
from trimtab.ops.precision import island_dtype
from trimtab.train.batch import MicroBatch, on_device


@dataclass(frozen=True, slots=True)
class Drift:
    """Of each routed layer, by its number as text.

    Args:
        kl: mean KL divergence in nats.
        overlap: share of the base's choices of experts that the adapted model makes too.
    """

    kl: dict[str, float]
    overlap: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """Layer with the largest divergence, and that divergence."""
        layer = max(self.kl, key=lambda name: self.kl[name])
        return layer, self.kl[layer]

    def row(self) -> dict[str, object]:
        """Columns of a metrics row."""
        return {"router_kl": {k: round(v, 6) for k, v in self.kl.items()},
                "router_overlap": {k: round(v, 4) for k, v in self.overlap.items()}}


@torch.no_grad()
def router_drift(model: CausalLM, probe: MicroBatch, tokens: int) -> Drift | None:
    """Run a probe with the adapter and without it.

    Args:
        model: with an adapter.
        probe: fixed over the run.
        tokens: only the first so many real tokens count.

    Returns:
        None for a model without routed layers.
    """
    adapted, chosen = _routing(model, probe, tokens)
    if not adapted:
        return None
    with disabled(model):
        base, expected = _routing(model, probe, tokens)
    kl, overlap = {}, {}
    for layer, p in base.items():
        q = adapted[layer]
        kl[str(layer)] = float((p * (p.log() - q.log())).sum(1).mean())
        same = (expected[layer].unsqueeze(2) == chosen[layer].unsqueeze(1)).any(2)
        overlap[str(layer)] = float(same.to(p.dtype).mean())
    return Drift(kl, overlap)


def _routing(
    model: CausalLM, probe: MicroBatch, tokens: int
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Routing distributions [T, E] and chosen experts [T, A] by layer."""
    device = model.embed.weight.device
    tape = ChoiceTape()
    valid = probe.valid.to(device)
    context = ForwardContext.packed(
        probe.lengths, device, valid=valid, tape=tape, images=on_device(probe.images, device),
    )  # fmt: skip
    with _scores(model) as scores:
        model(probe.input_ids.to(device), context)
    ids = {layer: ids[valid][:tokens] for (layer, kind), ids in tape.choices.items()
           if kind == "experts" and isinstance(ids, Tensor)}
    tiny = torch.finfo(torch.float32).tiny
    probabilities = {}
    for layer, score in scores.items():
        kept = score[valid][:tokens].clamp_min(tiny)
        probabilities[layer] = kept / kept.sum(1, keepdim=True)
    return probabilities, ids


@contextmanager
def _scores(model: CausalLM) -> Iterator[dict[int, Tensor]]:
    """Collects the scores [T, E] of every router that runs inside the block."""
    found: dict[int, Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ForwardContext, int]) -> None:
        x, _, layer = inputs
        assert isinstance(module, Router), "hooks sit on routers"
        wide = island_dtype(x)
        found[layer] = torch.sigmoid(x.to(wide) @ module.weight.to(wide).mT)

    hooks = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, Router)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
