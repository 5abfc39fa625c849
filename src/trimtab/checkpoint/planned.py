"""Planning: which move gives each tensor of a layout from the tensors of a source.

Knows: when bytes can be moved and when values must be decoded. Does not know: files of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_of
from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import DTYPE_BYTES, StoredTensor
from trimtab.checkpoint.cast import CASTABLE, QUANTISED, family
from trimtab.checkpoint.companions import config_with_dtype, config_without_mtp
from trimtab.checkpoint.converted import ConvertedSource
from trimtab.checkpoint.layout import PLAIN, FileKey, Layout, Target, targets
from trimtab.checkpoint.moves import ByteMove, CastMove, HeldMove, Pieces, PlannedTensor
from trimtab.checkpoint.source import Source
from trimtab.checkpoint.structure import require_equal
from trimtab.errors import ArchError, CheckpointError

BaseDtype = Literal["native", "bf16", "fp32"]
_WRITTEN_DTYPES = {"bf16": ("bfloat16", "BF16"), "fp32": ("float32", "F32")}


def written_arch(source: Source, base_dtype: BaseDtype) -> tuple[ArchSpec, ArchSpec, dict[str, Any]]:
    """The architecture of a checkpoint, the one after a cast, and the config that says the latter.

    Raises:
        CheckpointError: TT302 to TT304 if tensors are not as the config says.
        ArchError: TT202 if the family's config cannot say `base_dtype`, TT205 if the stored form
            is only recognised.
    """
    config, where = source.config(), f"{source.where}/config.json"
    arch = load_arch(config, where)
    require_equal(arch, source.entries(), source.where)
    if base_dtype == "native":
        return arch, arch, config
    config_name, dtype = _WRITTEN_DTYPES[base_dtype]
    config = config_with_dtype(config, config_name)
    config = config_without_mtp(config) if arch.mtp else config
    written = load_arch(config, where)
    if written.dtype != dtype:
        raise ArchError("TT202", where, f"the config of {arch.family} cannot say {base_dtype}")
    return arch, written, config


def plan_tensors(
    source: Source, arch: ArchSpec, written: ArchSpec, layout: Layout
) -> dict[FileKey, list[PlannedTensor]]:
    """Every tensor by the owner of its file, wide dtypes first so that all are aligned.

    Args:
        source: a checkpoint whose structure was checked.
        arch: its architecture.
        written: the same with the dtype and form to be written.
        layout: how parameters are divided.

    Raises:
        CheckpointError: TT304 if a dtype cannot be cast, TT313 if a cut goes through a block.
    """
    entries, pieces = source.entries(), Pieces(written)
    params = {param.name: param for param in inventory(arch)}
    is_native = arch == written

    def found(stored: StoredTensor) -> tuple[str, tuple[int, ...]]:
        entry = entries.get(stored.name)
        if entry is None or stored.transform not in PLAIN:
            return stored.dtype, stored.shape
        shape = entry.shape if stored.transform == "pad_tail" else stored.shape
        return (entry.dtype if is_native else stored.dtype), shape

    @lru_cache(maxsize=8)
    def of_parts(target: Target) -> Sequence[dict[str, StoredTensor]]:
        by_part: dict[tuple[int, ...], dict[str, StoredTensor]] = {}
        for stored in stored_of(arch, params[target.param.name], target.experts):
            by_part.setdefault(stored.index, {})[stored.transform] = stored
        return [by_part[index] for index in sorted(by_part)]

    planned: dict[FileKey, list[PlannedTensor]] = {}
    for param in inventory(written):
        before = stored_of(arch, params[param.name], range(1) if param.owner == "routed_expert" else None)
        for target in targets(written, layout, param, found):
            move: PlannedTensor = ByteMove(target, source, pieces)
            if is_native and isinstance(source, ConvertedSource) and source.layout == layout:
                move = HeldMove(target, source)
            elif not is_native and _needs_cast(before[0], entries[before[0].name].dtype, target):
                move = CastMove(target, source, of_parts)
            planned.setdefault(target.key, []).append(move)
    for tensors in planned.values():
        tensors.sort(key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    return planned


def _needs_cast(stored: StoredTensor, dtype: str, target: Target) -> bool:
    if stored.transform in PLAIN and dtype == target.dtype:
        return False
    if stored.transform in PLAIN and dtype not in CASTABLE:
        raise CheckpointError("TT304", stored.name, f"{dtype} cannot be cast to {target.dtype}")
    assert stored.transform in PLAIN or family(stored) in QUANTISED, stored.transform
    return True
