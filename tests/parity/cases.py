"""The parity cases: our model, loaded through its weight map, against an outside reference.

Families that transformers has are compared with it (in a process of its own), K3 and K3.1 with the naive
float64 model. Each case gives rows `(check, dtype, measured, kind of tolerance)`; the tests assert
on them and `python -m tests.parity.table` writes them into docs/parity.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tests.oracles import (
    naive_k3,
    random_dsa,
    random_glm5_next,
    random_k3,
    random_kimi_k25,
    random_kimi_linear,
)
from tests.oracles.random_tensors import random_ids, save_checkpoint
from tests.oracles.run_hf import run_hf
from tests.support.compare import relative_error
from tests.support.prompts import Prompt, image_batch
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.codec import Part, parts
from trimtab.checkpoint.load import load_model
from trimtab.models.context import ForwardContext, Recompute
from trimtab.models.decoder import CausalLM
from trimtab.models.tape import ChoiceTape

LENGTHS = (7, 70)
GRIDS = (((1, 4, 6),), ((1, 2, 4), (3, 6, 2)))  # frames, rows, columns of the images of a prompt
# grid and whether it is a video, per prompt
MEDIA = ((((1, 2, 2), False),), (((1, 4, 6), False), ((3, 2, 4), True), ((1, 2, 2), False)))
SEED = 1


@dataclass(frozen=True)
class Row:
    """One line of the parity table."""

    model: str
    check: str
    dtype: str
    measured: float
    kind: str


@dataclass(frozen=True)
class Reference:
    """What the outside reference computed, under released names."""

    prompts: list[Prompt]
    logits: list[Tensor]
    losses: list[float]
    hidden: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]


def kimi_linear(folder: Path, dtype: str, **fields: object) -> Reference:
    """Write a checkpoint to `folder` and run transformers on it."""
    config = random_kimi_linear.tiny_config(**fields)
    random_kimi_linear.write_checkpoint(folder, config, seed=SEED)
    sequences = [random_ids(config, n, seed=n) for n in LENGTHS]
    return hf_reference(folder, sequences, dtype)


def dsa(folder: Path, dtype: str, family: str, **fields: object) -> Reference:
    """Write a checkpoint to `folder` and run transformers on it."""
    config = random_dsa.tiny_config(family, **fields)
    random_dsa.write_checkpoint(folder, config, seed=SEED)
    return hf_reference(folder, [random_ids(config, n, seed=n) for n in LENGTHS], dtype)


def kimi_k25(folder: Path, dtype: str, **fields: object) -> Reference:
    """Write a checkpoint to `folder` and run transformers on it, text only."""
    config = random_kimi_k25.tiny_config(**fields)
    random_kimi_k25.write_checkpoint(folder, config, seed=SEED)
    return hf_reference(folder, [random_ids(config, n, seed=n) for n in LENGTHS], dtype)


def glm5_next(folder: Path, dtype: str, *, media: bool = False, **fields: object) -> Reference:
    """Write a checkpoint to `folder` and run transformers on it, with images and a video or not."""
    config = random_glm5_next.tiny_config(**fields)
    random_glm5_next.write_checkpoint(folder, config, seed=SEED)
    if not media:
        words = random_glm5_next.random_words
        return hf_reference(folder, [words(config, n, seed=n) for n in LENGTHS], dtype)
    items = [
        random_glm5_next.media_prompt(config, grids, length, seed=length)
        for grids, length in zip(MEDIA, LENGTHS, strict=True)
    ]
    inputs = {
        f"{name}.{n}": value
        for n, (_, found) in enumerate(items)
        for name, value in random_glm5_next.processor_output(config, found).items()
    }
    reference = hf_reference(folder, [ids for ids, _ in items], dtype, inputs)
    for hidden in reference.hidden:
        del hidden["embed"]  # theirs are the rows before image features are written
    prompts = [media_prompt(config, *pair) for pair in items]
    return replace(reference, prompts=prompts)


def media_prompt(
    config: dict[str, object], ids: list[int], items: list[random_glm5_next.Item]
) -> Prompt:
    """A prompt of the tests with the items of the oracle."""
    images = tuple((item.patches, item.grid) for item in items)
    media = config["image_token_id"]
    assert isinstance(media, int)
    return Prompt(ids, media, images, tuple(item.span for item in items))


def hf_reference(
    folder: Path, sequences: list[list[int]], dtype: str,
    inputs: Mapping[str, Tensor] | None = None,
) -> Reference:
    """What transformers computes on the checkpoint in `folder`."""
    found = run_hf(folder, sequences, dtype, inputs=inputs)
    hidden: list[dict[str, Tensor]] = [{} for _ in sequences]
    for name, value in found.items():
        if name.startswith("hidden."):
            _, n, place = name.split(".")
            hidden[int(n)][place] = value
    return Reference(
        [Prompt(ids) for ids in sequences],
        [found[f"logits.{n}"] for n in range(len(sequences))],
        [float(found[f"loss.{n}"]) for n in range(len(sequences))],
        hidden,
        {n.removeprefix("grad."): v for n, v in found.items() if n.startswith("grad.")},
    )


def k3(folder: Path, dtype: str, *, indexer: bool, vision: bool = False) -> Reference:
    """Write a checkpoint to `folder` and run the naive model, always in float64."""
    del dtype
    config = random_k3.tiny_config(indexer, vision=vision)
    tensors = random_k3.random_checkpoint(config, seed=SEED)
    save_checkpoint(folder, config, tensors)
    prompts = [Prompt(random_ids(config, n, seed=n)) for n in LENGTHS]
    if vision:
        prompts = [image_prompt(config, grids, n) for n, grids in enumerate(GRIDS)]
    leaves = naive_k3.float64_leaves(tensors)
    losses = []
    for prompt in prompts:
        loss = naive_k3.loss(config, leaves, prompt.ids, prompt.images)
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        hidden = [naive_k3.hidden_states(config, tensors, p.ids, p.images) for p in prompts]
        logits = [naive_k3.logits(config, tensors, p.ids, p.images) for p in prompts]
    gradients = {n: p.grad for n, p in leaves.items() if p.grad is not None}
    return Reference(prompts, logits, losses, hidden, gradients)


def image_prompt(
    config: dict[str, object], grids: Sequence[tuple[int, int, int]], seed: int
) -> Prompt:
    """A random prompt with random images of these grids."""
    ids, images = random_k3.image_prompt(config, list(grids), seed)
    return Prompt(ids, config["media_placeholder_token_id"], tuple(images))


CASES: dict[str, Callable[[Path, str], Reference]] = {
    "kimi_linear, direct query": lambda f, d: kimi_linear(f, d),
    "kimi_linear, query latent, expert groups": lambda f, d: kimi_linear(
        f, d, q_lora_rank=24, num_expert_group=2, topk_group=1
    ),
    "deepseek_v3": lambda f, d: dsa(f, d, "deepseek_v3"),
    "deepseek_v32": lambda f, d: dsa(f, d, "deepseek_v32"),
    "glm_moe_dsa, shared selections": lambda f, d: dsa(f, d, "glm_moe_dsa"),
    "kimi_k25": lambda f, d: kimi_k25(f, d),
    "glm5_next": lambda f, d: glm5_next(f, d),
    "glm5_next, a shared selection": lambda f, d: glm5_next(f, d, kinds="KSsK"),
    "glm5_next, pools of 2, images and videos": lambda f, d: glm5_next(
        f, d, media=True, index_kpool=2
    ),
    "kimi_k3": lambda f, d: k3(f, d, indexer=False),
    "kimi_k3 with indexer (K3.1)": lambda f, d: k3(f, d, indexer=True),
    "kimi_k3 with indexer and images": lambda f, d: k3(f, d, indexer=True, vision=True),
}


def rows(model_name: str, folder: Path, dtype: str) -> Iterator[Row]:
    """Run one case in `float64` or `float32`."""
    reference = CASES[model_name](folder, dtype)
    compute = torch.float64 if dtype == "float64" else torch.float32
    base = "fp64" if dtype == "float64" else "fp32"
    model, arch = load_model(folder, base_dtype=base, compute_dtype=compute)
    prompts = reference.prompts

    def row(check: str, measured: float, kind: str) -> Row:
        return Row(model_name, check, dtype, measured, f"{kind}.{dtype}")

    full, hidden = zip(*(_forward(model, prompt) for prompt in prompts), strict=True)
    yield row("logits", _worst(full, reference.logits), "model.logits")
    if dtype == "float64":
        errors = [
            relative_error(mine[place], value)
            for mine, theirs in zip(hidden, reference.hidden, strict=True)
            for place, value in theirs.items()
        ]
        yield row("hidden states of every layer", max(errors), "model.hidden")
    for name, recompute in (("gradients", "none"), ("gradients, layers recomputed", "layer")):
        worst = _gradient_error(model, arch, prompts, reference.gradients, recompute)
        yield row(name, worst, "model.gradients")
    yield row("cached decoding = full pass", _cached_error(model, prompts[1], full[1]), "self")
    yield row("packed = separate", _packed_error(model, prompts, full), "self")


def _worst(found: tuple[Tensor, ...], expected: list[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def _forward(model: CausalLM, prompt: Prompt) -> tuple[Tensor, dict[str, Tensor]]:
    hidden: dict[str, Tensor] = {}
    ctx = ForwardContext.packed(
        [len(prompt.ids)], observe=hidden.__setitem__, images=image_batch([prompt])
    )
    return model.logits(model(torch.tensor(prompt.ids), ctx)), hidden


@torch.no_grad()
def _cached_error(model: CausalLM, prompt: Prompt, full: Tensor) -> float:
    """Prefill in pieces that cut no image, then token by token."""
    cache, out = model.new_cache(1), []
    for piece in prompt.split([11, 20, 33, *range(34, len(prompt.ids))]):
        ctx = ForwardContext.packed([len(piece.ids)], cache=cache, images=image_batch([piece]))
        out.append(model.logits(model(torch.tensor(piece.ids), ctx)))
    return relative_error(torch.cat(out), full)


@torch.no_grad()
def _packed_error(model: CausalLM, prompts: list[Prompt], full: tuple[Tensor, ...]) -> float:
    flat = torch.tensor([i for prompt in prompts for i in prompt.ids])
    ctx = ForwardContext.packed([len(p.ids) for p in prompts], images=image_batch(prompts))
    return relative_error(model.logits(model(flat, ctx)), torch.cat(full))


def _gradient_error(
    model: CausalLM, arch: ArchSpec, prompts: list[Prompt], expected: dict[str, Tensor],
    recompute: Recompute,
) -> float:
    """Worst over released tensors; a tensor without gradient on one side must have none or 0."""
    model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    for prompt in prompts:
        ctx = ForwardContext.packed(
            [len(prompt.ids)], tape=ChoiceTape(), recompute=recompute,
            images=image_batch([prompt]),
        )
        hidden = model(torch.tensor(prompt.ids), ctx)
        places, labels = (torch.tensor(x) for x in zip(*prompt.labels(), strict=True))
        model.token_losses(hidden[places], labels).mean().backward()
    worst = 0.0
    for part in parts(arch):
        parameter = _parameter(model, part)
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        name = part.stored[0].name.removesuffix("_packed")
        theirs = expected.get(name)
        found = mine[part.index] if part.index else mine
        if theirs is None:
            error = float(found.abs().max())
        else:
            error = relative_error(found.flatten(), theirs.flatten()[: found.numel()])
        worst = max(worst, error)
    model.requires_grad_(False)
    return worst


def _parameter(model: CausalLM, part: Part) -> Tensor:
    if part.param.owner == "routed_expert":
        return model.get_parameter(f"{part.param.name}.weight")
    return model.get_parameter(part.param.name)
