"""Saving: a checkpoint in the released file format, written as a stream.

Knows: sharding by layer, the safetensors layout, the index. Does not know: where tensors come
from (`codec.TensorFor`), training.

Memory is one stored tensor at a time: all sizes are known beforehand, so each file's header is
written first and its tensors follow in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trimtab.arch.load import require_readable
from trimtab.arch.maps import stored_tensors
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import DTYPE_BYTES, StoredTensor
from trimtab.checkpoint.codec import (
    TORCH_DTYPES,
    Progress,
    StoredFromParts,
    TensorFor,
    as_stored,
    packed_kind,
    to_bytes,
)
from trimtab.checkpoint.headers import header_bytes
from trimtab.checkpoint.manifest import (
    ArtefactWriter,
    inventory_hash,
    require_free_space,
    write_artefact,
)
from trimtab.checkpoint.released import SINGLE_FILE_BYTES
from trimtab.checkpoint.source import INDEX_NAME
from trimtab.errors import CheckpointError
from trimtab.models.packed import PackedWeight


def save_checkpoint(
    dst: str | Path,
    arch: ArchSpec,
    config: Mapping[str, object],
    tensor_for: TensorFor,
    extra_files: Mapping[str, bytes] | None = None,
    *,
    source_fingerprint: str | None = None,
    extra: Mapping[str, object] | None = None,
    single_file_bytes: int = SINGLE_FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write config, weights, index and manifest to a new directory.

    Args:
        dst: directory; absent, empty, or unfinished by an earlier call.
        arch: what `config` says.
        config: written as config.json.
        tensor_for: gives each stored tensor in its stored shape and dtype, called once for each.
        extra_files: further files by name, such as tokenizer.json.
        source_fingerprint: of what the weights were made from.
        extra: facts for the manifest.
        single_file_bytes: above this size there is a file per layer and an index.
        progress: called with bytes done and in all.

    Raises:
        CheckpointError: TT309 if `dst` holds something else, TT311 if the disk is too small,
            TT304 if `tensor_for` gives another shape or dtype.
        ArchError: TT205 if the stored form is only recognised.
    """
    require_readable(arch, str(dst))
    shards = plan_shards(arch, single_file_bytes)
    total = sum(stored.num_bytes for shard in shards.values() for stored in shard)
    require_free_space(dst, total)
    writing = write_artefact(
        dst, "checkpoint", source_fingerprint=source_fingerprint,
        inventory_hash=inventory_hash(arch), extra=extra,
    )
    with writing as out:
        done = 0
        for file, shard in shards.items():
            done = _write_file(out, file, shard, tensor_for, (done, total), progress)
        if len(shards) > 1:
            weight_map = {stored.name: file for file, shard in shards.items() for stored in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            out.write(INDEX_NAME, _json(index))
        for name, data in (extra_files or {}).items():
            out.write(name, data)
        out.write("config.json", _json(dict(config)))


def plan_shards(arch: ArchSpec, single_file_bytes: int) -> dict[str, list[StoredTensor]]:
    """File name to its tensors in file order: wide dtypes first, so that all are aligned."""
    stored = stored_tensors(arch)
    if sum(tensor.num_bytes for tensor in stored) <= single_file_bytes:
        return {"model.safetensors": _aligned(stored)}
    layer_of = {param.name: param.layer for param in inventory(arch)}
    groups: dict[int, list[StoredTensor]] = {}
    for tensor in stored:
        layer = layer_of[tensor.param]
        groups.setdefault(-1 if layer is None else layer, []).append(tensor)
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": _aligned(groups[layer])
        for number, layer in enumerate(sorted(groups), start=1)
    }


def tensors_from_model(model: nn.Module, arch: ArchSpec) -> TensorFor:
    """The stored tensors of a loaded model, the inverse of loading.

    Values kept in the stored dtype or wider come back bit for bit; what is
    kept packed keeps its bytes; decoded matrices that lie on the grid of their form are packed
    without loss, others are rounded to it.

    Args:
        model: built for `arch`, with values.
        arch: the architecture.

    Raises:
        CheckpointError: TT302 at a vision tensor of a model built without vision.
    """
    parameters = dict(model.named_parameters())

    def part_for(param: ParamSpec, index: tuple[int, ...]) -> Tensor:
        if param.name in parameters:
            return parameters[param.name].detach()[index]
        if param.owner in ("vision", "projector"):
            rule = "the model was built without vision, so this tensor cannot be saved"
            raise CheckpointError("TT302", param.name, rule)
        return parameters[f"{param.name}.weight"].detach()[index]

    encode = StoredFromParts(arch, part_for)

    packed = {name: m for name, m in model.named_modules() if isinstance(m, PackedWeight)}

    def tensor_for(stored: StoredTensor) -> Tensor:
        kind, weight = packed_kind(stored), packed.get(stored.param)
        if kind is None or weight is None:
            return encode(stored)
        if kind == "shape":
            return as_stored(torch.tensor(weight.shape[-2:]), stored)
        return as_stored(weight.stored(stored.index, kind).detach(), stored)

    return tensor_for


def _aligned(stored: Sequence[StoredTensor]) -> list[StoredTensor]:
    return sorted(stored, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])


def _write_file(
    out: ArtefactWriter,
    file: str,
    shard: Sequence[StoredTensor],
    tensor_for: TensorFor,
    position: tuple[int, int],
    progress: Progress | None,
) -> int:
    done, total = position
    with out.open(file) as handle:
        handle.write(header_bytes(shard))
        for stored in shard:
            tensor = tensor_for(stored)
            if tuple(tensor.shape) != stored.shape or tensor.dtype != TORCH_DTYPES[stored.dtype]:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                rule = f"must be {stored.dtype} {list(stored.shape)} to be written"
                raise CheckpointError("TT304", stored.name, rule, value=found)
            handle.write(to_bytes(tensor))
            done += stored.num_bytes
            if progress is not None:
                progress(done, total)
    return done


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
