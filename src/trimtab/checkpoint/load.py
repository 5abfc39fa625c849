"""Loading: a model built on the meta device, filled tensor by tensor from its released files.

Knows: the order of reading, where each part goes, that nothing is left out or over.
Does not know: how a model computes, training.

Memory beside the model itself is a block of a tensor, or one expert's matrix, at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from trimtab.arch.load import load_arch
from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.blocks import read_part_into
from trimtab.checkpoint.codec import (
    Part,
    Progress,
    TensorFor,
    check_finite,
    decode_part,
    packed_kind,
    parts,
    to_tensor,
)
from trimtab.checkpoint.source import Source, open_source
from trimtab.checkpoint.structure import require_equal
from trimtab.models.build import build_model
from trimtab.models.decoder import CausalLM
from trimtab.models.experts import DenseWeight
from trimtab.models.packed import PackedWeight

BaseDtype = Literal["native", "bf16", "fp32", "fp64"]
_VISION_OWNERS = ("vision", "projector")


def load_model(
    path: str | Path,
    *,
    base_dtype: BaseDtype = "bf16",
    compute_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    vision: bool = True,
    ops: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> tuple[CausalLM, ArchSpec]:
    """Build the model of a checkpoint and fill it.

    Args:
        path: what `open_source` takes.
        base_dtype: how weights are kept: `native` as released (routed experts packed), else
            decoded; tensors stored as F32 stay F32 unless `fp64`.
        compute_dtype: of activations; None means float64 for `fp64`, else float32 on CPU and
            bfloat16 elsewhere.
        device: where parameters live.
        vision: load tower and projector where there are any; without them the model takes text
            only, and their tensors are checked but not read.
        ops: implementations forced per operator, such as {"kda": "reference"}.
        progress: see `Progress`.

    Returns:
        The model, frozen, and its architecture.

    Raises:
        ArchError: config.json is not understood.
        CheckpointError: TT301 to TT310, before anything is built where possible.
    """
    source = open_source(path)
    arch = load_arch(source.config(), source.where)
    require_equal(arch, source.entries(), source.where)
    if compute_dtype is None:
        on_cpu = torch.device(device).type == "cpu"
        compute_dtype = torch.float32 if on_cpu else torch.bfloat16
        compute_dtype = torch.float64 if base_dtype == "fp64" else compute_dtype
    model = build_model(arch, base_dtype=base_dtype, compute_dtype=compute_dtype, ops=ops, vision=vision)
    allocate(model, device)
    fill(model, arch, source, progress=progress)
    return model, arch


def stored_reader(source: Source) -> TensorFor:
    """Reads whole stored tensors as the file has them, checked for NaN and infinity."""

    def read(stored: StoredTensor) -> Tensor:
        entry = source.entries()[stored.name]
        tensor = to_tensor(source.read(stored.name), entry.dtype, entry.shape)
        check_finite(tensor, stored, source.where)
        return tensor

    return read


def allocate(model: nn.Module, device: str | torch.device) -> None:
    """Give every meta parameter uninitialised memory of its dtype on `device`, still frozen."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ValueError(f"buffer {name} is on meta; buffers must hold their values")
            module._buffers[name] = buffer.to(device)


@torch.no_grad()
def fill(
    model: CausalLM,
    arch: ArchSpec,
    source: Source,
    *,
    progress: Progress | None = None,
) -> None:
    """Fill an allocated model from a checkpoint whose structure was checked.

    Args:
        model: built for `arch`, with or without vision.
        arch: the architecture.
        source: the checkpoint.
        progress: see `Progress`.

    Raises:
        CheckpointError: TT310 for NaN, infinity or a NaN scale, TT301 if a file ends early.
    """
    entries = source.entries()
    skipped = _VISION_OWNERS if model.vision is None else ()
    wanted = [part for part in parts(arch) if part.param.owner not in skipped]
    wanted.sort(key=lambda p: (entries[p.stored[0].name].file, entries[p.stored[0].name].begin))
    total = sum(entries[s.name].num_bytes for part in wanted for s in part.stored)
    parameters = dict(model.named_parameters())
    read, done = stored_reader(source), 0
    filled: Counter[str] = Counter()
    for part in wanted:
        _write(model, parameters, part, source, read)
        filled[part.param.name] += part.numel
        done += sum(entries[stored.name].num_bytes for stored in part.stored)
        if progress is not None:
            progress(done, total)
    _check_accounts(arch, parameters, filled, skipped)


def _write(
    model: nn.Module, parameters: dict[str, nn.Parameter], part: Part, source: Source,
    read: TensorFor,
) -> None:
    target = parameters.get(part.param.name)
    if target is not None:
        read_part_into(target.data[part.index], part, source)
        return
    expert = model.get_submodule(part.param.name)
    if not isinstance(expert, PackedWeight):
        assert isinstance(expert, DenseWeight), f"{part.param.name} is no weight of experts"
        expert.write_dense(part.index, decode_part(part, read))
        return
    for stored in part.stored:
        value, kind = read(stored), packed_kind(stored)
        if kind is not None and kind != "shape":
            expert.write_packed(part.index, kind, value)


def _check_accounts(
    arch: ArchSpec, parameters: Iterable[str], filled: Counter[str], skipped: Collection[str]
) -> None:
    """Every element of the inventory was written once, every parameter is in the inventory."""
    specs = [spec for spec in inventory(arch) if spec.owner not in skipped]
    short = [spec.name for spec in specs if filled[spec.name] != spec.numel]
    assert not short, f"the weight map does not fill {short[:5]}"
    names = {spec.name for spec in specs}
    unknown = [n for n in parameters if n not in names and n.rpartition(".")[0] not in names]
    assert not unknown, f"parameters outside the inventory: {unknown[:5]}"
