"""A checkpoint copied file by file, with some tensors computed anew.

Knows: which bytes are copied as they are and where computed ones go; that every copied byte is
proved by its hash. Does not know: how values are computed (`recompute`), adapters.

Files keep their names and order. A file whose tensors all keep their size is cloned and patched;
others are laid out again. Memory is a block of bytes, or a block of rows of one matrix.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.checkpoint.clone import clone_file, shares_blocks
from trimtab.checkpoint.codec import TORCH_DTYPES, Progress, check_values
from trimtab.checkpoint.headers import DTYPE_SIZES
from trimtab.checkpoint.manifest import ArtefactWriter, FileRecord
from trimtab.checkpoint.source import Source
from trimtab.errors import CheckpointError

BLOCK_BYTES = 8 * 2**20

Put = Callable[[str, int, memoryview], None]
"""Writes bytes of an output tensor, by its name, from an offset inside it."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of an output file.

    Args:
        name: as in the file.
        dtype: safetensors dtype string.
        shape: its sizes.
        is_copy: the source has it with the same bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_copy: bool

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        total = DTYPE_SIZES[self.dtype]
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One weight file.

    Args:
        name: file name.
        header: its bytes before the first tensor.
        tensors: in file order.
        twin: source file with the same header, which can be cloned; None where there is none.
    """

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    twin: str | None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    def begins(self) -> Iterator[tuple[OutputTensor, int]]:
        """Tensors with their absolute offsets."""
        offset = len(self.header)
        for tensor in self.tensors:
            yield tensor, offset
            offset += tensor.num_bytes


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of the tensors of a checkpoint.

    Args:
        changed: tensors whose bytes differ from those of the source, or that it does not have.
        identical: tensors with the same bytes, proved by their hashes.
        cloned_bytes: bytes that share their blocks with the source.
    """

    changed: int
    identical: int
    cloned_bytes: int


def needed_bytes(source: Source, plan: Sequence[OutputFile], directory: Path) -> int:
    """Bytes that writing takes from the disk of `directory`, which exists."""
    twins = [path for file in plan if (path := _twin_path(source, file)) is not None]
    clones = bool(twins) and shares_blocks(twins[0], directory)
    total = 0
    for file in plan:
        if clones and file.twin is not None:
            total += sum(t.num_bytes for t in file.tensors if not t.is_copy)
        else:
            total += file.size
    return total


def write_files(
    source: Source, plan: Sequence[OutputFile], out: ArtefactWriter,
    compute: Callable[[Put], None], progress: Progress | None = None,
) -> Rewritten:
    """Write all files, let `compute` fill what is not copied, and prove the copies.

    Args:
        source: where copied bytes come from.
        plan: the files.
        out: the directory.
        compute: called once with a function that writes into the output tensors.
        progress: called with bytes copied and in all.

    Raises:
        CheckpointError: TT301 where the source cannot be read, TT310 where it holds NaN or infinity, TT315 where a copy is not what the
            source holds.
    """
    total, done, cloned = sum(file.size for file in plan), 0, 0
    copied: dict[str, bytes] = {}
    paths = {}
    for file in plan:
        paths[file.name] = path = out.begin(file.name)
        twin = _twin_path(source, file)
        if twin is not None:
            cloned += file.size if clone_file(twin, path) else 0
        else:
            copied |= _compose(source, file, path)
        done += file.size
        if progress is not None:
            progress(done, total)
    _patch(plan, paths, compute)
    changed = identical = 0
    for file in plan:
        record, hashes = _read_back(file, paths[file.name])
        same = _identical(source, file, hashes, copied, out.directory)
        identical += same
        changed += len(file.tensors) - same
        out.finish(file.name, record)
    return Rewritten(changed, identical, cloned)


def _twin_path(source: Source, file: OutputFile) -> Path | None:
    return None if file.twin is None else source.local_path(file.twin)


def _compose(source: Source, file: OutputFile, path: Path) -> dict[str, bytes]:
    """Write header and copied tensors, leaving room for the others; hashes of what was copied."""
    hashes = {}
    with path.open("wb") as handle:
        handle.truncate(file.size)
        handle.write(file.header)
        for tensor, begin in file.begins():
            if not tensor.is_copy:
                continue
            digest = hashlib.sha256()
            handle.seek(begin)
            for block in _blocks(source, tensor):
                handle.write(block)
                digest.update(block)
            hashes[tensor.name] = digest.digest()
    return hashes


def _blocks(source: Source, tensor: OutputTensor) -> Iterator[bytearray]:
    """The bytes of a copied tensor, refused where they are no numbers."""
    where = f"{source.where}: {tensor.name}"
    exponents = tensor.dtype == "U8" and tensor.name.endswith("_scale")
    for start in range(0, tensor.num_bytes, BLOCK_BYTES):
        block = source.read(tensor.name, start, min(BLOCK_BYTES, tensor.num_bytes - start))
        check_values(torch.frombuffer(block, dtype=TORCH_DTYPES[tensor.dtype]), where, exponents)
        yield block


def _patch(
    plan: Iterable[OutputFile], paths: dict[str, Path], compute: Callable[[Put], None]
) -> None:
    """Run `compute` with a function that writes at a place of an output tensor."""
    places = {
        tensor.name: (file.name, begin, tensor.num_bytes)
        for file in plan for tensor, begin in file.begins() if not tensor.is_copy
    }
    handles: dict[str, int] = {}

    def put(name: str, offset: int, data: memoryview) -> None:
        file, begin, size = places[name]
        assert offset + data.nbytes <= size, f"{name}: bytes beyond its end"
        if file not in handles:
            handles[file] = os.open(paths[file], os.O_WRONLY)
        written = 0
        flat = data.cast("B")
        while written < len(flat):
            written += os.pwrite(handles[file], flat[written:], begin + offset + written)

    try:
        compute(put)
    finally:
        for handle in handles.values():
            os.close(handle)


def _read_back(file: OutputFile, path: Path) -> tuple[FileRecord, dict[str, bytes]]:
    """Hash of the file and of each tensor in it, from the disk."""
    whole, hashes = hashlib.sha256(), {}
    with path.open("rb") as handle:
        whole.update(handle.read(len(file.header)))
        for tensor in file.tensors:
            digest, left = hashlib.sha256(), tensor.num_bytes
            while left:
                block = handle.read(min(BLOCK_BYTES, left))
                if not block:
                    rule = f"ended {left} bytes early"
                    raise CheckpointError("TT301", f"{path}: {tensor.name}", rule)
                left -= len(block)
                whole.update(block)
                digest.update(block)
            hashes[tensor.name] = digest.digest()
    return FileRecord(file.size, whole.hexdigest()), hashes


def _identical(
    source: Source, file: OutputFile, hashes: dict[str, bytes], copied: dict[str, bytes],
    directory: Path,
) -> int:
    """Number of tensors of a file with the bytes of the source."""
    entries, count = source.entries(), 0
    for tensor in file.tensors:
        entry = entries.get(tensor.name)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            continue
        wanted = copied.get(tensor.name) or _source_hash(source, tensor)
        if hashes[tensor.name] == wanted:
            count += 1
        elif tensor.is_copy:
            rule = f"was copied from {source.where} and holds other bytes"
            raise CheckpointError("TT315", f"{directory / file.name}: {tensor.name}", rule,
                                  hint="check the disk, and that nothing writes to the source")
    return count


def _source_hash(source: Source, tensor: OutputTensor) -> bytes:
    digest = hashlib.sha256()
    for block in _blocks(source, tensor):
        digest.update(block)
    return digest.digest()
