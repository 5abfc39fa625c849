"""Greedy decoding of many prompts at once, and streaming of one.

Knows: caches and the model. Does not know: text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trimtab.models.cache import ModelCache
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.decoder import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int,
    stop_ids: Sequence[int], *, images: ImageBatch | None = None,
) -> list[list[int]]:
    """Continue every prompt greedily.

    Args:
        model: on its device.
        prompts: token ids, none empty.
        max_new_tokens: most tokens per prompt.
        stop_ids: a prompt ends at the first of these, which is not returned.
        images: of all prompts, their rows counted over the prompts laid end to end.

    Returns:
        New ids per prompt, in the order of the prompts.
    """
    device = model.embed.weight.device
    answers: list[list[int]] = [[] for _ in prompts]
    cache = model.new_cache(len(prompts))
    active = list(range(len(prompts)))
    next_ids = _prefill(model, prompts, cache, images)
    for _ in range(max_new_tokens):
        ids = next_ids.tolist()
        going = [n for n, token in enumerate(ids) if token not in stop_ids]
        for n in going:
            answers[active[n]].append(ids[n])
        if not going:
            break
        if len(going) < len(active):
            keep = torch.tensor(going, device=device)
            cache.keep(keep)
            next_ids, active = next_ids[keep], [active[n] for n in going]
        ctx = ForwardContext.packed([1] * len(active), device, cache=cache)
        next_ids = model.logits(model(next_ids, ctx)).argmax(-1)
    return answers


def _prefill(
    model: CausalLM, prompts: Sequence[Sequence[int]], cache: ModelCache,
    images: ImageBatch | None,
) -> Tensor:
    """Fill the cache with the prompts; [N] first new id of each."""
    device = model.embed.weight.device
    ctx = ForwardContext.packed([len(p) for p in prompts], device, cache=cache, images=images)
    flat = torch.tensor([i for prompt in prompts for i in prompt], device=ctx.device)
    hidden = model(flat, ctx)
    return model.logits(hidden[ctx.cu_seqlens[1:].long() - 1]).argmax(-1)


@torch.no_grad()
def stream(
    model: CausalLM, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int], *,
    images: ImageBatch | None = None,
) -> Iterator[int]:
    """Yield the greedy continuation of one prompt, id by id; arguments as for `generate`."""
    cache = model.new_cache(1)
    token = int(_prefill(model, [prompt], cache, images)[0])
    for _ in range(max_new_tokens):
        if token in stop_ids:
            return
        yield token
        ctx = ForwardContext.packed([1], model.embed.weight.device, cache=cache)
        hidden = model(torch.tensor([token], device=ctx.device), ctx)
        token = int(model.logits(hidden)[0].argmax())
