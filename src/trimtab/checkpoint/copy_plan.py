"""The plan of a copied checkpoint: its files, which tensors are copied and which are computed.

Knows: how the stored tensors of a changed or cast matrix take the place of those it came from.
Does not know: how values are computed, how bytes are written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.arch.maps import WEIGHT_MAPS, mtp_tensors, stored_of, stored_tensors
from trimtab.arch.params import ParamSpec, inventory, mtp_inventory
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.codec import Part, packed_kind
from trimtab.checkpoint.headers import TensorEntry, header_bytes
from trimtab.checkpoint.released import ReleasedFile, released_files
from trimtab.checkpoint.rewrite import OutputFile, OutputTensor
from trimtab.checkpoint.source import Source

# Parameter and leading indices.
PartKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a copy consists of.

    Args:
        files: in order of their names.
        parts: parts of parameters that are computed.
        outputs: the stored tensors that hold each of them in the copy.
    """

    files: tuple[OutputFile, ...]
    parts: tuple[Part, ...]
    outputs: Mapping[PartKey, tuple[StoredTensor, ...]]


def plan_copy(
    source: Source, arch: ArchSpec, written: ArchSpec, changed: Collection[str]
) -> CopyPlan:
    """Plan a copy of `source`, which keeps files and order.

    Args:
        source: a checkpoint of `arch`.
        arch: what its config says.
        written: what the copy's config says: `arch` itself to keep every stored form, else the
            same model with plain matrices.
        changed: parameters whose values change.
    """
    entries = source.entries()
    outputs: dict[PartKey, tuple[StoredTensor, ...]] = {}
    # Name of a stored tensor -> what stands in its place.
    places: dict[str, tuple[StoredTensor, ...]] = {}
    computed: list[Part] = []
    keeps_forms = written is arch
    dtypes = {param.name: param.dtype for param in _params(written)}
    for part in _changed_parts(arch, changed) if keeps_forms else _all_parts(arch):
        kept = _as_found(part, entries)
        targets = kept if keeps_forms else _plain(dtypes, part, kept)
        if targets == kept and part.param.name not in changed:
            continue
        computed.append(part)
        outputs[part.param.name, part.index] = targets
        if len(targets) == len(kept):
            places |= {old.name: (new,) for old, new in zip(kept, targets, strict=True)}
        else:
            places |= {old.name: () for old in kept} | {kept[0].name: targets}
    files = tuple(
        _output_file(file, places) for file in released_files(source)
    )
    return CopyPlan(files, tuple(computed), outputs)


def _changed_parts(arch: ArchSpec, changed: Collection[str]) -> list[Part]:
    return [
        part for param in inventory(arch) if param.name in changed
        for part in _by_index(param, stored_of(arch, param))
    ]


def _all_parts(arch: ArchSpec) -> list[Part]:
    params = {param.name: param for param in _params(arch)}
    grouped: dict[str, list[StoredTensor]] = {}
    for stored in (*stored_tensors(arch), *mtp_tensors(arch)):
        grouped.setdefault(stored.param, []).append(stored)
    return [part for name, stored in grouped.items() for part in _by_index(params[name], stored)]


def _params(arch: ArchSpec) -> tuple[ParamSpec, ...]:
    """Those of the model and of its multi-token prediction layers."""
    return inventory(arch) + mtp_inventory(arch, tables=WEIGHT_MAPS[arch.family].mtp_tables)


def _by_index(param: ParamSpec, stored: Sequence[StoredTensor]) -> list[Part]:
    found: dict[tuple[int, ...], list[StoredTensor]] = {}
    for tensor in stored:
        found.setdefault(tensor.index, []).append(tensor)
    return [Part(param, index, tuple(tensors)) for index, tensors in found.items()]


def _as_found(part: Part, entries: Mapping[str, TensorEntry]) -> tuple[StoredTensor, ...]:
    """The stored tensors of a part with the dtype and shape that the file has, padding included."""
    return tuple(
        replace(stored, dtype=entry.dtype, shape=entry.shape)
        for stored in part.stored if (entry := entries.get(stored.name)) is not None
    )


def _plain(
    dtypes: Mapping[str, str], part: Part, kept: tuple[StoredTensor, ...]
) -> tuple[StoredTensor, ...]:
    """What holds a part of an unquantised copy; a plain tensor keeps its shape."""
    dtype = dtypes[part.param.name]
    if len(kept) == 1:
        return (replace(kept[0], dtype=dtype),)
    values = next(stored for stored in kept if packed_kind(stored) == "packed")
    name = values.name.removesuffix("_packed")
    return (StoredTensor(name, part.shape, dtype, part.param.name, part.index),)


def _output_file(
    file: ReleasedFile, places: Mapping[str, tuple[StoredTensor, ...]]
) -> OutputFile:
    tensors: list[OutputTensor] = []
    for name, entry in file.tensors:
        new = places.get(name)
        if new is None:
            tensors.append(OutputTensor(name, entry.dtype, entry.shape, True))
            continue
        # The sizes of a matrix are the same whatever its values.
        tensors += [
            OutputTensor(t.name, t.dtype, t.shape, packed_kind(t) == "shape") for t in new
        ]
    is_same = [(t.name, t.dtype, t.shape) for t in tensors] == [
        (name, entry.dtype, entry.shape) for name, entry in file.tensors
    ]
    header = file.header if is_same else None
    twin = file.twin if is_same else None
    return OutputFile(file.name, header or header_bytes(tensors), tuple(tensors), twin)
