"""Copying a checkpoint as a stream, with an adapter added and the dtype changed on the way.

Knows: which tensors change and that all others keep their bytes. Does not know: models; whether
the result computes the same is checked by `verify.merged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.arch.params import ParamSpec
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.adapter import (
    AdapterFile,
    AdapterMeta,
    adapter_base,
    load_adapter,
    save_adapter,
)
from trimtab.checkpoint.codec import (
    Part,
    Progress,
    StoredFromParts,
    TensorFor,
    decode_part,
    parts,
)
from trimtab.checkpoint.companions import (
    companion_files,
    config_with_dtype,
    config_without_mtp,
)
from trimtab.checkpoint.load import stored_reader
from trimtab.checkpoint.save import save_checkpoint
from trimtab.checkpoint.source import Source, open_source
from trimtab.checkpoint.structure import require_equal
from trimtab.errors import AdapterError, ArchError

OutputDtype = Literal["native", "bf16", "fp32"]
_CONFIG_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def copy_checkpoint(
    source: Source,
    dst: str | Path,
    *,
    adapter: AdapterFile | None = None,
    dtype: OutputDtype = "native",
    extra: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint again in the released format, merged with an adapter if one is given.

    Multi-token prediction layers are left out, and the config written says so. W becomes W + scaling * B A, added in float32 and rounded once to the stored dtype; a matrix
    trained in full replaces W.

    Args:
        source: the base checkpoint.
        dst: new directory.
        adapter: read for the base's architecture.
        dtype: `native` keeps every tensor's stored form; `bf16` and `fp32` decode packed experts
            and write all tensors of the model's own dtype so.
        extra: facts for the manifest.
        progress: called with bytes done and in all.

    Raises:
        AdapterError: TT503 if the adapter touches packed experts with `native`.
        ArchError: TT202 if the family's config cannot say `dtype`.
        CheckpointError: see `require_equal` and `save_checkpoint`.
    """
    config = source.config()
    arch = load_arch(config, source.where)
    require_equal(arch, source.entries(), source.where)
    if dtype != "native":
        config = config_with_dtype(config, _CONFIG_DTYPES[dtype])
    if arch.mtp:
        config = config_without_mtp(config)
    written = load_arch(config, source.where)
    if dtype != "native" and written.dtype != {"bf16": "BF16", "fp32": "F32"}[dtype]:
        raise ArchError("TT202", source.where, f"the config of {arch.family} cannot say {dtype}")
    save_checkpoint(
        dst, written, config, merged_tensors(source, arch, written, adapter),
        companion_files(source),
        source_fingerprint=source.fingerprint(), extra=extra, progress=progress,
    )


def export_adapter(src: str | Path, dst: str | Path, base: str | None = None) -> int:
    """Write an adapter again in PEFT's form, held against its base; returns its tensor count.

    Args:
        src: adapter directory.
        dst: new directory.
        base: its base; by default what the adapter names.

    Raises:
        AdapterError: TT502 if it does not fit the base.
        CheckpointError: TT309 if `dst` holds something.
    """
    base = base or adapter_base(src)
    source = open_source(base)
    arch = load_arch(source.config(), source.where)
    adapter = load_adapter(src, arch)
    fingerprint = adapter.manifest.source_fingerprint if adapter.manifest else None
    meta = AdapterMeta(base, fingerprint, {"made_by": "export"})
    save_adapter(dst, arch, adapter.targets, adapter.tensors, meta)
    return len(adapter.tensors)


def merged_tensors(
    source: Source, arch: ArchSpec, written: ArchSpec, adapter: AdapterFile | None
) -> TensorFor:
    """Stored tensors of `written` from a source of `arch`: bytes where possible, else values."""
    read = stored_reader(source)
    by_part = {(part.param.name, part.index): part for part in parts(arch)}
    known = {stored for part in by_part.values() for stored in part.stored}
    deltas = _Deltas(adapter)
    entries = source.entries()

    def part_for(param: ParamSpec, index: tuple[int, ...]) -> Tensor:
        part: Part = by_part[param.name, index]
        value = decode_part(part, read)
        return deltas.applied(param.name, value)

    encode = StoredFromParts(written, part_for)

    def tensor_for(stored: StoredTensor) -> Tensor:
        if stored.param not in deltas.names and stored in known:
            entry = entries[stored.name]
            if (entry.dtype, entry.shape) == (stored.dtype, stored.shape):
                return read(stored)
        if stored.param in deltas.names and stored.transform.startswith(("mxfp4", "fp8", "int4")):
            rule = "packed weights cannot take an adapter without loss"
            raise AdapterError("TT503", stored.param, rule, hint="merge with --dtype bf16")
        return encode(stored)

    return tensor_for


class _Deltas:
    """What an adapter does to base matrices: scaling * B A is added, a full weight replaces."""

    def __init__(self, adapter: AdapterFile | None) -> None:
        self._tensors = adapter.tensors if adapter is not None else {}
        targets = adapter.targets if adapter is not None else ()
        self._by_name = {f"{target.fqn}.weight": target for target in targets}
        self._full = {name for name in self._tensors if ".lora." not in name}
        self.names = frozenset(self._by_name) | self._full

    def applied(self, name: str, value: Tensor) -> Tensor:
        """The value of a base matrix with what the adapter makes of it."""
        if name in self._full:
            return self._tensors[name]
        if name not in self._by_name:
            return value
        target = self._by_name[name]
        a, b = (self._tensors[f"{target.fqn}.lora.{side}"] for side in "AB")
        return value.to(torch.float32) + target.scaling * (b @ a)
