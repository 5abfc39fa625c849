"""The parity cases: our model, loaded through its weight map, against an outside reference.

kimi_linear is compared with transformers (in a process of its own), K3 and K3.1 with the naive
float64 model. Each case gives rows `(check, dtype, measured, kind of tolerance)`; the tests assert
on them and `python -m tests.parity.table` writes them into docs/parity.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles import naive_k3, random_k3, random_kimi_linear
from tests.oracles.random_tensors import random_ids, save_checkpoint
from tests.support.compare import relative_error
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.codec import Part, parts
from trimtab.checkpoint.load import load_model
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.tape import ChoiceTape
from trimtab.ops.cross_entropy import cross_entropy

HF_SCRIPT = Path(naive_k3.__file__).with_name("hf_kimi_linear.py")
LENGTHS = (7, 70)
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

    logits: list[Tensor]
    losses: list[float]
    hidden: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]


def kimi_linear(folder: Path, dtype: str, **fields: object) -> Reference:
    """Write a checkpoint to `folder` and run transformers on it."""
    config = random_kimi_linear.tiny_config(**fields)
    random_kimi_linear.write_checkpoint(folder, config, seed=SEED)
    sequences = [random_ids(config, n, seed=n) for n in LENGTHS]
    ids, out = folder / "ids.json", folder / f"{dtype}.out"
    ids.write_text(json.dumps(sequences))
    command = [sys.executable, str(HF_SCRIPT), str(folder), str(ids), str(out), "--dtype", dtype]
    done = subprocess.run([*command, "--grads"], capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = load_file(out)
    hidden: list[dict[str, Tensor]] = [{} for _ in LENGTHS]
    for name, value in found.items():
        if name.startswith("hidden."):
            _, n, place = name.split(".")
            hidden[int(n)][place] = value
    return Reference(
        [found[f"logits.{n}"] for n in range(len(LENGTHS))],
        [float(found[f"loss.{n}"]) for n in range(len(LENGTHS))],
        hidden,
        {n.removeprefix("grad."): v for n, v in found.items() if n.startswith("grad.")},
    )


def k3(folder: Path, dtype: str, *, indexer: bool) -> Reference:
    """Write a checkpoint to `folder` and run the naive model, always in float64."""
    del dtype
    config = random_k3.tiny_config(indexer)
    tensors = random_k3.random_checkpoint(config, seed=SEED)
    save_checkpoint(folder, config, tensors)
    sequences = [random_ids(config, n, seed=n) for n in LENGTHS]
    leaves = naive_k3.float64_leaves(tensors)
    losses = []
    for ids in sequences:
        loss = naive_k3.loss(config, leaves, ids)
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        hidden = [naive_k3.hidden_states(config, tensors, ids) for ids in sequences]
        logits = [naive_k3.logits(config, tensors, ids) for ids in sequences]
    gradients = {n: p.grad for n, p in leaves.items() if p.grad is not None}
    return Reference(logits, losses, hidden, gradients)


CASES: dict[str, Callable[[Path, str], Reference]] = {
    "kimi_linear, direct query": lambda f, d: kimi_linear(f, d),
    "kimi_linear, query latent, expert groups": lambda f, d: kimi_linear(
        f, d, q_lora_rank=24, num_expert_group=2, topk_group=1
    ),
    "kimi_k3": lambda f, d: k3(f, d, indexer=False),
    "kimi_k3 with indexer (K3.1)": lambda f, d: k3(f, d, indexer=True),
}


def rows(model_name: str, folder: Path, dtype: str) -> Iterator[Row]:
    """Run one case in `float64` or `float32`."""
    reference = CASES[model_name](folder, dtype)
    compute = torch.float64 if dtype == "float64" else torch.float32
    base = "fp64" if dtype == "float64" else "fp32"
    model, arch = load_model(folder, base_dtype=base, compute_dtype=compute)
    sequences = _sequences(folder, arch)

    def row(check: str, measured: float, kind: str) -> Row:
        return Row(model_name, check, dtype, measured, f"{kind}.{dtype}")

    full, hidden = zip(*(_forward(model, ids) for ids in sequences), strict=True)
    yield row("logits", _worst(full, reference.logits), "model.logits")
    if dtype == "float64":
        errors = [
            relative_error(mine[place], value)
            for mine, theirs in zip(hidden, reference.hidden, strict=True)
            for place, value in theirs.items()
        ]
        yield row("hidden states of every layer", max(errors), "model.hidden")
    for recompute in (False, True):
        name = "gradients, layers recomputed" if recompute else "gradients"
        worst = _gradient_error(model, arch, sequences, reference.gradients, recompute)
        yield row(name, worst, "model.gradients")
    yield row("cached decoding = full pass", _cached_error(model, sequences[1], full[1]), "self")
    yield row("packed = separate", _packed_error(model, sequences, full), "self")


def _sequences(folder: Path, arch: ArchSpec) -> list[list[int]]:
    config = json.loads((folder / "config.json").read_text())
    del arch
    return [random_ids(config, n, seed=n) for n in LENGTHS]


def _worst(found: tuple[Tensor, ...], expected: list[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def _forward(model: CausalLM, ids: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    hidden: dict[str, Tensor] = {}
    ctx = ForwardContext.packed([len(ids)], observe=hidden.__setitem__)
    return model.logits(model(torch.tensor(ids), ctx)), hidden


@torch.no_grad()
def _cached_error(model: CausalLM, ids: list[int], full: Tensor) -> float:
    """Prefill in two pieces, then token by token."""
    cache, out = model.new_cache(1), []
    borders = [0, 20, 33, *range(34, len(ids) + 1)]
    for begin, end in pairwise(borders):
        ctx = ForwardContext.packed([end - begin], cache=cache)
        out.append(model.logits(model(torch.tensor(ids[begin:end]), ctx)))
    return relative_error(torch.cat(out), full)


@torch.no_grad()
def _packed_error(model: CausalLM, sequences: list[list[int]], full: tuple[Tensor, ...]) -> float:
    flat = torch.tensor([i for ids in sequences for i in ids])
    ctx = ForwardContext.packed([len(ids) for ids in sequences])
    return relative_error(model.logits(model(flat, ctx)), torch.cat(full))


def _gradient_error(
    model: CausalLM, arch: ArchSpec, sequences: list[list[int]], expected: dict[str, Tensor],
    recompute: bool,
) -> float:
    """Worst over released tensors; a tensor without gradient on one side must have none or 0."""
    model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    for ids in sequences:
        ctx = ForwardContext.packed([len(ids)], tape=ChoiceTape(), recompute=recompute)
        hidden = model(torch.tensor(ids), ctx)
        labels = torch.tensor(ids[1:])
        (cross_entropy(hidden[:-1], model.head_weight, labels) / len(labels)).backward()
    worst = 0.0
    for part in parts(arch):
        if part.param.owner in ("vision", "projector"):
            continue
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
