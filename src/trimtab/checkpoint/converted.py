"""Converted directories read as what they were made from: tensors under their released names.

Knows: where each stored tensor's bytes lie in the files of a layout. Does not know: torch, how the
directory was written.

Everything that reads a released checkpoint reads a converted one through this: loading, merging,
exporting, inspecting, and converting to another layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_of
from trimtab.arch.params import inventory
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.boxes import scatter
from trimtab.checkpoint.files import FileStore
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.layout import (
    LAYOUT_NAME,
    PLAIN,
    UNMAPPED,
    FileKey,
    Layout,
    Target,
    layout_from_dict,
    targets,
)
from trimtab.checkpoint.source import Source
from trimtab.errors import CheckpointError


class ConvertedSource(Source):
    """A converted directory under the released names of its tensors.

    Args:
        store: where the files lie.

    Raises:
        CheckpointError: TT306 if the layout document cannot be understood.
    """

    def __init__(self, store: FileStore) -> None:
        super().__init__(store)
        document = self._json(LAYOUT_NAME)
        where = f"{self.where}/{LAYOUT_NAME}"
        self.layout: Layout = layout_from_dict(document, where)
        self._base_dtype = str(document.get("base_dtype"))
        self._made_from = str(document.get("source_fingerprint"))
        self._owner_of = _owners(document, where)
        self._held: dict[FileKey, dict[str, TensorEntry]] = {}
        # Released name -> the boxes that together hold it, and the number of the part.
        self._places: dict[str, tuple[Sequence[Target], int]] = {}

    @property
    def is_released(self) -> bool:
        """Whether entries say where tensors lie in files of the released layout."""
        return False

    def has_weights(self) -> bool:
        """Whether there is anything for `entries` to read."""
        return bool(self._owner_of)

    def files(self) -> tuple[str, ...]:
        """Names of the weight files, sorted."""
        return tuple(sorted(self._owner_of))

    def fingerprint(self) -> str:
        """That of the checkpoint it was made from, whatever the layout; another one after a cast."""
        if self._base_dtype == "native":
            return self._made_from
        return hashlib.sha256(f"{self._made_from} {self._base_dtype}".encode()).hexdigest()

    def read_held(self, target: Target, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a tensor of this directory's own layout from `start` on.

        Raises:
            CheckpointError: TT301 or TT302 if it is not there or cannot be read.
        """
        Source._read_range(self, self._find(target), target.name, start, out)

    def _find(self, target: Target) -> TensorEntry:
        entry = self._held.get(target.key, {}).get(target.name)
        if entry is None:
            raise CheckpointError("TT302", f"{self.where}/{target.key.name}: {target.name}",
                                  "tensor is in no file of its owner",
                                  hint="`trimtab verify files` names damaged files")
        if entry.num_bytes != target.num_bytes:
            raise CheckpointError("TT304", f"{self.where}/{entry.file}: {target.name}",
                                  f"must be {target.dtype} {list(target.shape)}",
                                  value=f"{entry.dtype} {list(entry.shape)}")
        return entry

    def _read_entries(self) -> dict[str, TensorEntry]:
        arch = load_arch(self.config(), f"{self.where}/config.json")
        names = list(self.files())
        first: dict[str, TensorEntry] = {}
        for name, header in zip(names, self._read_headers(names), strict=True):
            self._held.setdefault(self._owner_of[name], {}).update(header)
            for tensor, entry in header.items():
                first.setdefault(tensor, entry)

        entries = dict(self._held.get(FileKey(0, UNMAPPED), {}))
        for param in inventory(arch):
            found = partial(_as_stored, first, param.numel)
            boxes: dict[str, list[Target]] = {}
            for target in targets(arch, self.layout, param, found):
                boxes.setdefault(target.transform, []).append(target)
            numbers: dict[str, int] = {}
            for stored in sorted(stored_of(arch, param), key=lambda tensor: tensor.index):
                number = numbers.get(stored.transform, 0)
                numbers[stored.transform] = number + 1
                place = boxes[stored.transform]
                entries[stored.name] = self._entry_of(stored, place, number, found(stored))
                self._places[stored.name] = (place, number)
        return entries

    def _entry_of(
        self, stored: StoredTensor, boxes: Sequence[Target], number: int,
        found: tuple[str, tuple[int, ...]],
    ) -> TensorEntry:
        """An entry that says where the first byte lies; its file may hold only a shard."""
        box = next(box for box in boxes if number in box.parts)
        held = self._find(box)
        begin = held.begin + (number - box.parts.start) * box.piece_bytes
        dtype, shape = found
        size = prod(shape) * box.item
        return TensorEntry(dtype, shape, held.file, begin, begin + size)

    def _read_range(self, entry: TensorEntry, name: str, start: int, out: memoryview) -> None:
        if name not in self._places:
            super()._read_range(entry, name, start, out)
            return
        boxes, number = self._places[name]
        for box in boxes:
            if number in box.parts:
                self._read_box(box, number, name, start, out)

    def _read_box(
        self, box: Target, number: int, name: str, start: int, out: memoryview
    ) -> None:
        """Put what a box has of a range of a stored tensor into its places in `out`."""
        held = self._find(box)
        begin = (number - box.parts.start) * box.piece_bytes
        pitch, width = box.matrix[1] * box.item, len(box.columns) * box.item
        skip = box.columns.start * box.item

        def read(offset: int, view: memoryview) -> None:
            Source._read_range(self, held, f"{name} in {box.name}", begin + offset, view)

        scatter(read, pitch, box.rows, skip, width, start, out)


def _as_stored(
    first: Mapping[str, TensorEntry], numel: int, stored: StoredTensor
) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a stored tensor of a parameter as the directory keeps it."""
    entry = first.get(stored.param)
    if stored.transform not in PLAIN or entry is None:
        return stored.dtype, stored.shape
    if stored.transform != "pad_tail":
        return entry.dtype, stored.shape
    tail = first.get(f"{stored.param}.tail")
    return entry.dtype, (numel + (0 if tail is None else tail.shape[0]),)


def _owners(document: Mapping[str, Any], where: str) -> dict[str, FileKey]:
    try:
        return {name: FileKey(*key) for name, key in document["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("TT306", where, f"not a layout document: {error}") from error
