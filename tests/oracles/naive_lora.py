"""LoRA and AdamW on the naive float64 model: the loss curve of an adapter file.

Written from PEFT's definition, W + (alpha / r) B A, with one pair of matrices per released matrix,
those of single experts included. Which of them are one and the same parameter is the caller's to
say.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from . import naive_k3
from .naive_ops import F64

_PREFIX = "base_model.model."


def curve(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    adapter: Path,
    batches: list[list[list[int]]],
    lr: float,
    parameter_of: Callable[[str], str],
) -> tuple[list[float], dict[str, Tensor]]:
    """Train the adapter, one AdamW step per batch.

    Args:
        config: a released-shape configuration.
        tensors: released tensors, packed experts included.
        adapter: PEFT directory with one pair per matrix and one rank and alpha.
        batches: token sequences of each step.
        lr: learning rate.
        parameter_of: key of the file -> key of the parameter it is, the first of those that share one.

    Returns:
        The loss before each update, and the trained parameters by every key of the file.
    """
    options = json.loads((adapter / "adapter_config.json").read_text())
    scaling = options["lora_alpha"] / options["r"]
    file = load_file(adapter / "adapter_model.safetensors")
    leaves = {parameter_of(key): file[parameter_of(key)].to(F64).requires_grad_() for key in file}
    values = {key: leaves[parameter_of(key)] for key in file}
    base = {name: leaf.detach() for name, leaf in naive_k3.float64_leaves(tensors).items()}
    optimizer = torch.optim.AdamW(list(leaves.values()), lr=lr, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(config, _adapted(base, values, scaling), batch)
        loss.backward()
        for leaf in leaves.values():  # the experts of a layer are one parameter, reached or not
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in values.items()}


def _adapted(base: Mapping[str, Tensor], values: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    adapted = dict(base)
    for key, a in values.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight") + ".weight"
            b = values[key.replace(".lora_A.", ".lora_B.")]
            adapted[name] = base[name] + scaling * b @ a
    return adapted


def _loss(config: Mapping[str, Any], tensors: Mapping[str, Tensor], batch: list[list[int]]) -> Tensor:
    """Mean over all predicted tokens of the batch, in nats."""
    found = []
    for ids in batch:
        log_p = torch.log_softmax(naive_k3.logits(config, tensors, ids)[:-1], dim=-1)
        found += [-log_p[t, token] for t, token in enumerate(ids[1:])]
    return torch.stack(found).mean()
