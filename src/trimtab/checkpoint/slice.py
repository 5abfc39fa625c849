"""Slicing: a small valid checkpoint of the real tensors of a large one, by ranged reads.

Knows: which stored tensor of the large model is which of the small one, and which rows of a router
are kept. Does not know: torch, how the result is written (`convert.write_plan`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trimtab.arch.load import load_arch
from trimtab.arch.maps import is_carried, stored_of
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec, MoESpec
from trimtab.arch.stored import DTYPE_BYTES, StoredTensor
from trimtab.checkpoint.companions import companion_files
from trimtab.checkpoint.convert import Plan, as_json
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.manifest import inventory_hash, versions
from trimtab.checkpoint.moves import PlannedTensor, RawMove, check_finite
from trimtab.checkpoint.slice_config import kept_experts, sliced_config
from trimtab.checkpoint.source import INDEX_NAME, Source
from trimtab.checkpoint.stream import FilePlan, plan_file, split_by_bytes
from trimtab.checkpoint.structure import require_equal

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class RowsMove:
    """Rows of a stored tensor of the source, under another name.

    Args:
        source: the checkpoint.
        of: its tensor.
        name: in the slice.
        entry: of the source's tensor.
        rows: kept rows in order, None for the whole tensor.
    """

    source: Source
    of: StoredTensor
    name: str
    entry: TensorEntry
    rows: Sequence[int] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> str:
        """Safetensors dtype string."""
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        if self.rows is None:
            return self.entry.shape
        return (len(self.rows), *self.entry.shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.entry.num_bytes if self.rows is None else len(self.rows) * self._pitch

    @property
    def grain(self) -> int:
        """All bytes come from one tensor."""
        return max(1, self.num_bytes)

    @property
    def _pitch(self) -> int:
        return self.entry.num_bytes // self.entry.shape[0]

    def fill(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `begin` on."""
        done = 0
        for start, length in self._runs(begin, len(out)):
            self.source.read_into(self.of.name, start, out[done : done + length])
            done += length
        check_finite(out, begin, self.dtype, self.of.transform, self._where, self.shape)

    def _where(self) -> str:
        return f"{self.source.where}/{self.entry.file}: {self.of.name}"

    def _runs(self, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Ranges of the source's tensor that are next to each other in the slice."""
        if self.rows is None:
            yield begin, count
            return
        while count:
            row, within = divmod(begin, self._pitch)
            last = row
            while last + 1 < len(self.rows) and self.rows[last + 1] == self.rows[last] + 1:
                last += 1
            length = min(count, (last - row + 1) * self._pitch - within)
            yield self.rows[row] * self._pitch + within, length
            begin, count = begin + length, count - length


def plan_slice(
    source: Source, layers: Sequence[int], experts: int | None, *, vision: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Find out which bytes make the checkpoint of some layers and experts.

    Args:
        source: a checkpoint.
        layers: layers that are kept, in order; they are numbered anew.
        experts: routed experts that are kept in each layer, None for all.
        vision: keep tower and projector.
        shard_bytes: above this size there are several files and an index.

    Raises:
        ConfigError: TT102 if there are no such layers or experts.
        ArchError: TT202 if the family's config cannot say this selection.
        CheckpointError: TT302 to TT304 if tensors are not as the config says.
    """
    where = f"{source.where}/config.json"
    config = source.config()
    arch = load_arch(config, where)
    require_equal(arch, source.entries(), source.where)
    made, sliced = sliced_config(config, arch, layers, experts, vision=vision, where=where)
    tensors = list(_tensors(source, arch, sliced, layers, experts))
    tensors.sort(key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    files = _shards(tensors, shard_bytes)
    document = {
        "layers": list(layers), "experts": experts, "vision": vision,
        "files": {file.name: file.size for file in files},
        "source_fingerprint": source.fingerprint(), "trimtab": versions()["trimtab"],
    }
    small = companion_files(source) | {"config.json": as_json(made)}
    if len(files) > 1:
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        total = sum(tensor.num_bytes for tensor in tensors)
        small[INDEX_NAME] = as_json({"metadata": {"total_size": total}, "weight_map": weight_map})
    text = json.dumps(document).encode()
    return Plan(source, tuple(files), small, text, "slice", inventory_hash(sliced))


def _tensors(
    source: Source, arch: ArchSpec, sliced: ArchSpec, layers: Sequence[int], experts: int | None
) -> Iterator[PlannedTensor]:
    params = {param.name: param for param in inventory(arch)}
    entries = source.entries()
    for param in inventory(sliced):
        layer = None if param.layer is None else layers[param.layer]
        name = param.name
        if layer is not None:
            name = f"layers.{layer}.{name.split('.', 2)[2]}"
        kept = _kept(arch, layer, experts)
        rows = kept if param.owner == "router" else None
        for of, stored in _pairs(arch, sliced, params[name], param, kept):
            yield RowsMove(source, of, stored.name, entries[of.name], rows)
    for name, entry in entries.items():
        if is_carried(arch, name):
            yield RawMove(source, name, entry.dtype, entry.shape, entry.num_bytes)


def _kept(arch: ArchSpec, layer: int | None, experts: int | None) -> list[int]:
    spec = arch.layers[layer].ffn if layer is not None else None
    return kept_experts(spec, experts) if isinstance(spec, MoESpec) else []


def _pairs(
    arch: ArchSpec, sliced: ArchSpec, large: ParamSpec, small: ParamSpec, kept: Sequence[int]
) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Each stored tensor of a parameter in the large model with the one of the small model."""
    if small.owner != "routed_expert":
        yield from zip(stored_of(arch, large), stored_of(sliced, small), strict=True)
        return
    for number, expert in enumerate(kept):
        of = stored_of(arch, large, range(expert, expert + 1))
        yield from zip(of, stored_of(sliced, small, range(number, number + 1)), strict=True)


def _shards(tensors: Sequence[PlannedTensor], shard_bytes: int) -> list[FilePlan]:
    groups = split_by_bytes(tensors, shard_bytes)
    if len(groups) == 1:
        return [plan_file("model.safetensors", groups[0])]
    return [
        plan_file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]
