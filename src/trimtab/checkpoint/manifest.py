"""Artefact directories: written atomically, closed by a manifest, checked by its hashes.

Knows: temporary names, fsync, rename, the marker of an unfinished directory, manifest.json.
Does not know: torch, what the files mean.

The order of writing is: marker, files (each complete or absent), manifest, marker removed. So a
directory with a marker is unfinished and one with a manifest is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.marker import MARKER_NAME, is_begun_or_empty, refuse_incomplete
from trimtab.errors import ArchError, CheckpointError, TrimtabError
from trimtab.units import format_bytes
from trimtab.verdict import Verdict

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_READ_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says of a directory.

    Args:
        kind: `checkpoint`, `adapter`, `training_state`, `dump`, ...
        files: file name to size and hash; the manifest itself is not listed.
        source_fingerprint: of what it was made from (`Source.fingerprint`), None if nothing.
        inventory_hash: of the parameter inventory it belongs to, None if it has none.
        versions: of Trimtab, Python and the packages that matter.
        extra: facts of this kind of directory, plain JSON values.
    """

    kind: str
    files: dict[str, FileRecord]
    source_fingerprint: str | None = None
    inventory_hash: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


class HashingFile:
    """A file being written whose size and hash are known at its end."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        self._handle.write(data)
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes

    def record(self) -> FileRecord:
        """Size and hash of all that was written."""
        return FileRecord(self._bytes, self._digest.hexdigest())


class ArtefactWriter:
    """Writes the files of one artefact directory; made by `write_artefact`.

    Args:
        directory: the directory, which has a marker.
        extra: facts for the manifest; may be filled until the directory is closed.
    """

    def __init__(self, directory: Path, extra: dict[str, object]) -> None:
        self.directory = directory
        self.extra = extra
        self.files: dict[str, FileRecord] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[HashingFile]:
        """Write one file; it appears under its name only when it is complete and on disk."""
        self.begin(name)
        with _replacing(self.directory / name) as handle:
            hashing = HashingFile(handle)
            yield hashing
        self.files[name] = hashing.record()

    def begin(self, name: str) -> Path:
        """The temporary path of a file that is filled in any order, until `finish`."""
        with (self.directory / MARKER_NAME).open("a") as marker:
            marker.write(f"{name}\n{name}.tmp\n")
        return self.directory / f"{name}.tmp"

    def finish(self, name: str, record: FileRecord) -> None:
        """Give a begun file its name, once it is on disk."""
        temporary = self.directory / f"{name}.tmp"
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(self.directory / name)
        self.files[name] = record

    def write(self, name: str, data: bytes) -> None:
        """Write one small file."""
        with self.open(name) as handle:
            handle.write(data)


@contextmanager
def write_artefact(
    dst: str | Path,
    kind: str,
    *,
    source_fingerprint: str | None = None,
    inventory_hash: str | None = None,
    extra: Mapping[str, object] | None = None,
) -> Iterator[ArtefactWriter]:
    """Write a directory that is either whole, with a manifest, or recognised as unfinished.

    On a TrimtabError inside (bad input) everything written is removed. On any other end (kill,
    full disk, defect) the marker stays, every reader refuses the directory and the next
    `write_artefact` to it starts over.

    Args:
        dst: directory; must not exist, be empty, or be an unfinished one of ours.
        kind: see `Manifest`.
        source_fingerprint: see `Manifest`.
        inventory_hash: see `Manifest`.
        extra: see `Manifest`.

    Raises:
        CheckpointError: TT309 if `dst` holds something else.
    """
    directory = Path(dst)
    check_output(directory)
    created = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    remove_unfinished(directory)
    write_atomic(directory / MARKER_NAME, b"")
    writer = ArtefactWriter(directory, dict(extra or {}))
    try:
        yield writer
    except TrimtabError:
        remove_unfinished(directory)
        if created and not any(directory.iterdir()):
            directory.rmdir()
        raise
    manifest = Manifest(
        kind, writer.files, source_fingerprint, inventory_hash, versions(), writer.extra
    )
    write_atomic(directory / MANIFEST_NAME, manifest_bytes(manifest))
    (directory / MARKER_NAME).unlink()
    sync_directory(directory)


def check_output(dst: str | Path) -> None:
    """Raise TT309 unless `dst` may be written: absent, empty or unfinished by us."""
    path = Path(dst)
    if not path.exists():
        return
    if path.is_dir() and is_begun_or_empty(item.name for item in path.iterdir()):
        return
    raise CheckpointError("TT309", str(path), "already holds something",
                          hint="choose another directory or remove that one")


def manifest_bytes(manifest: Manifest) -> bytes:
    """What stands in manifest.json."""
    return (json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n").encode()


def mark_unfinished(directory: Path) -> None:
    """Put the marker back on a finished directory that a later check has rejected."""
    manifest = read_manifest(directory)
    names = [] if manifest is None else list(manifest.files)
    write_atomic(directory / MARKER_NAME, "".join(f"{name}\n" for name in names).encode())


def read_manifest(directory: str | Path) -> Manifest | None:
    """The manifest of a directory, None for one that Trimtab did not write.

    Raises:
        CheckpointError: TT305 if the directory is unfinished, TT306 if the manifest is of another
            format.
        ArchError: TT204 if it is not valid JSON.
    """
    path = Path(directory) / MANIFEST_NAME
    refuse_incomplete(Path(directory))
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArchError("TT204", str(path), f"not valid JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format_version") != FORMAT_VERSION:
        found = value.get("format_version") if isinstance(value, dict) else None
        raise CheckpointError("TT306", str(path), f"format_version must be {FORMAT_VERSION}",
                              value=found)
    try:
        files = {name: FileRecord(**record) for name, record in value.pop("files").items()}
        return Manifest(files=files, **value)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("TT306", str(path), f"not a manifest: {error}") from error


def verify_files(directory: str | Path) -> list[Verdict]:
    """Compare size and hash of every file with the manifest, one verdict a file.

    Raises:
        CheckpointError: TT305 if there is no manifest.
    """
    root = Path(directory)
    manifest = read_manifest(root)
    if manifest is None:
        raise CheckpointError("TT305", str(root), f"has no {MANIFEST_NAME}, nothing to check against")
    verdicts = []
    for name, record in sorted(manifest.files.items()):
        path = root / name
        wrong, detail = 0.0, name
        if not path.is_file():
            wrong, detail = 1.0, f"{name}: missing"
        elif path.stat().st_size != record.bytes:
            wrong, detail = 1.0, f"{name}: {path.stat().st_size} bytes, manifest {record.bytes}"
        elif file_sha256(path) != record.sha256:
            wrong, detail = 1.0, f"{name}: sha256 differs"
        verdicts.append(Verdict.at_most("file as in manifest", wrong, 0.0, detail))
    return verdicts


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def inventory_hash(arch: ArchSpec) -> str:
    """Hash of every parameter's name, shape and dtype."""
    digest = hashlib.sha256()
    for param in inventory(arch):
        digest.update(f"{param.name} {param.shape} {param.dtype} {param.form}\n".encode())
    return digest.hexdigest()


def require_free_space(dst: str | Path, num_bytes: int) -> None:
    """Raise TT311 if the disk of `dst` lacks `num_bytes` and a small reserve."""
    parent = Path(dst).absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    needed = num_bytes + 64 * 2**20
    if free < needed:
        rule = f"{format_bytes(needed)} are needed, {format_bytes(free)} are free"
        raise CheckpointError("TT311", str(dst), rule, hint="free space or choose another disk")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old or the whole new one."""
    with _replacing(path) as handle:
        handle.write(data)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as handle:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(directory: Path) -> None:
    """Remove what an unfinished writer left: only names in its marker, then the marker."""
    marker = directory / MARKER_NAME
    if not marker.exists():
        return
    for name in marker.read_text().splitlines():
        path = directory / name
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        if path.parent != directory and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    marker.unlink()


def versions() -> dict[str, str]:
    """Of Trimtab, Python and the packages that matter to files."""
    found = {"python": platform.python_version()}
    for package in ("trimtab", "torch", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
