"""Random weights: a checkpoint of any architecture in the released format, from one seed.

Knows: a sensible distribution per kind of parameter. Does not know: presets, training.

Each part of a parameter is drawn from (seed, its name) alone, so that neither the order of
writing nor the rest of the architecture changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trimtab.arch.params import ParamSpec
from trimtab.arch.spec import ArchSpec, KDASpec
from trimtab.checkpoint.codec import PartFor, Progress, StoredFromParts
from trimtab.checkpoint.save import save_checkpoint

_TABLE_STD = 0.02
_STEP_RANGE = (1e-3, 1e-1)


def init_checkpoint(
    arch: ArchSpec,
    config: Mapping[str, object],
    dst: str | Path,
    seed: int,
    *,
    extra_files: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a random checkpoint.

    Args:
        arch: what `config` says.
        config: written as config.json.
        dst: new directory.
        seed: any integer; the same seed gives the same bytes.
        extra_files: further files by name, such as tokenizer.json.
        progress: called with bytes done and in all.

    Raises:
        CheckpointError: see `save_checkpoint`.
    """
    tensor_for = StoredFromParts(arch, random_parts(arch, seed))
    extra = {"made_by": "init", "seed": seed}
    save_checkpoint(dst, arch, config, tensor_for, extra_files, extra=extra, progress=progress)


def random_parts(arch: ArchSpec, seed: int) -> PartFor:
    """Gives initial values of `param[index]` in float32.

    Tables and the head are N(0, 0.02); matrices N(0, 1/fan_in), those that write to a residual
    stream reduced by sqrt(2 * layers of that stream); norms 1, biases 0; A_log is log U(1, 16), or
    0 where the gate is bounded; dt_bias is the inverse softplus of a step log-uniform in
    [1e-3, 1e-1]. The projector's last norm is 0.02, so that image rows are as large as those of
    text. Hyper-connections start with streams that are all alike.
    """

    def part_for(param: ParamSpec, index: tuple[int, ...]) -> Tensor:
        shape = param.shape[len(index):]
        draw = _generator(seed, param.name, index)
        leaf = param.name.removesuffix(".weight").rpartition(".")[2]
        if leaf == "A_log":
            return _decay_rate(arch, param, shape, draw)
        if leaf == "dt_bias":
            low, high = (math.log(bound) for bound in _STEP_RANGE)
            step = torch.exp(low + (high - low) * torch.rand(shape, generator=draw))
            return step + torch.log(-torch.expm1(-step))
        if leaf in ("bias", "base", "e_score_correction_bias", "index_kpool_compress_ape"):
            return torch.zeros(shape)
        if leaf == "scale":
            return torch.ones(shape)
        if param.name == "projector.post_norm.weight":
            return torch.full(shape, _TABLE_STD)
        if leaf.endswith("norm") or leaf.startswith("norm"):
            return torch.ones(shape)
        std = _TABLE_STD
        if param.owner not in ("embedding", "head", "residual") and leaf != "pos_emb":
            std = 1 / math.sqrt(math.prod(shape[1:]))
        if leaf in ("o_proj", "down_proj", "latent_up", "wo", "fc1") or param.name.endswith(".down"):
            layers = arch.num_layers
            if param.owner == "vision" and arch.vision is not None:
                layers = arch.vision.num_layers
            std /= math.sqrt(2 * layers)
        return std * torch.randn(shape, generator=draw)

    return part_for


def _decay_rate(
    arch: ArchSpec, param: ParamSpec, shape: tuple[int, ...], draw: torch.Generator
) -> Tensor:
    mixer = arch.layers[param.layer or 0].mixer
    if isinstance(mixer, KDASpec) and mixer.gate_lower_bound is not None:
        return torch.zeros(shape)
    return torch.log(1 + 15 * torch.rand(shape, generator=draw))


def _generator(seed: int, name: str, index: tuple[int, ...]) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}{list(index)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
