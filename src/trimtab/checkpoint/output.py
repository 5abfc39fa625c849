"""Outputs: a directory or a URL that a conversion writes file by file and can come back to.

Knows: temporary names, what is on the disk for certain, uploads. Does not know: what the files
hold, when a conversion is finished (`convert`).

Locally a file grows as `NAME.tmp`, how far it is safe stands in a note beside it, and it gets its
name when whole. An object store shows an object only when its upload has ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Protocol

from trimtab.checkpoint.direct import BlockFile, DirectReader, round_up
from trimtab.checkpoint.manifest import FileRecord, sync_directory, write_atomic
from trimtab.checkpoint.remote import RemoteStore
from trimtab.checkpoint.stream import FilePlan, Moved, Pipeline
from trimtab.errors import CheckpointError

WORK = ".trimtab-convert"
# Objects may have 10,000 parts; half of them leave room.
_MOST_PARTS = 5000
_SMALLEST_PART = 8 * 2**20
_UPLOADS = 3


class Output(Protocol):
    """Where a conversion goes."""

    where: str

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""

    def read(self, name: str) -> bytes | None:
        """All of a small file, None if it does not exist."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def names(self) -> list[str]:
        """Files directly inside."""

    def free(self) -> int | None:
        """Bytes that can still be written, None where nobody knows."""

    def kept(self, plan: FilePlan) -> int:
        """Bytes of an unfinished file that need not be written again."""

    def write(self, plan: FilePlan, pipeline: Pipeline, moved: Moved) -> FileRecord:
        """Write one planned file under its name, going on where an earlier call was killed."""

    def complete(self, plan: FilePlan) -> bool:
        """Whether a file that has a record is whole; gives it its name if only that was missing."""

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Hold a name; refuse if another process holds it."""

    def close(self) -> None:
        """Leave nothing behind that only helps to go on."""


class LocalOutput:
    """A directory of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.where = str(root)
        self._reader = DirectReader()

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""
        path = self._root / name
        return path.stat().st_size if path.is_file() else None

    def read(self, name: str) -> bytes | None:
        """All of a small file, None if it does not exist."""
        path = self._root / name
        return path.read_bytes() if path.is_file() else None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole."""
        with _disk_errors(f"{self.where}/{name}"):
            write_atomic(self._root / name, data)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self._root / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Files and directories directly inside."""
        return [path.name for path in self._root.iterdir()] if self._root.is_dir() else []

    def free(self) -> int:
        """Bytes that can still be written."""
        parent = self._root.absolute()
        while not parent.exists():
            parent = parent.parent
        return shutil.disk_usage(parent).free

    def kept(self, plan: FilePlan) -> int:
        """Bytes of an unfinished file that need not be written again."""
        note = self.read(_note(plan.name))
        size = self.size(plan.name + ".tmp")
        if note is None or size is None:
            return 0
        offset = int(json.loads(note)["offset"])
        return offset if offset <= size else 0

    def write(self, plan: FilePlan, pipeline: Pipeline, moved: Moved) -> FileRecord:
        """Write one planned file under its name, going on where an earlier call was killed."""
        temporary = self._root / f"{plan.name}.tmp"
        start = self.kept(plan)
        sink = _BlockSink(BlockFile(temporary), self, plan)
        try:
            record = pipeline.write(
                plan, sink, start=start, moved=moved, read_back=self._read_back(temporary)
            )
            sink.file.finish(plan.size)
        finally:
            sink.file.close()
        # The record comes first: a file under its name without one would have to be hashed again.
        self.put(record_name(plan.name), _record_text(record))
        temporary.replace(self._root / plan.name)
        sync_directory(self._root)
        self.remove(_note(plan.name))
        return record

    def complete(self, plan: FilePlan) -> bool:
        """Whether a file that has a record is whole; gives it its name if only that was missing."""
        if self.size(plan.name) == plan.size:
            return True
        if self.size(plan.name + ".tmp") != plan.size:
            return False
        (self._root / f"{plan.name}.tmp").replace(self._root / plan.name)
        sync_directory(self._root)
        return True

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a name; refuse if another process holds it.

        Raises:
            CheckpointError: TT312.
        """
        path = self._root / WORK / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                rule, hint = f"another process is writing {name}", "wait for it, or end it"
                raise CheckpointError("TT312", self.where, rule, hint=hint) from error
            yield

    def close(self) -> None:
        """Leave nothing behind that only helps to go on."""
        shutil.rmtree(self._root / WORK, ignore_errors=True)

    def _read_back(self, path: Path) -> Callable[[int, memoryview], None]:
        def fill(offset: int, out: memoryview) -> None:
            if self._reader.read_into(path, offset, out) != len(out):
                raise CheckpointError("TT301", str(path), "is shorter than what was written",
                                      hint="remove it and run the command again")

        return fill


class _BlockSink:
    """Blocks into a local file, with a note of how far it is safe."""

    def __init__(self, file: BlockFile, output: LocalOutput, plan: FilePlan) -> None:
        self.file = file
        self._output = output
        self._plan = plan

    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        """Write the first `num_bytes` of an aligned block."""
        with _disk_errors(self._place(offset)):
            self.file.write(offset, block[: round_up(num_bytes)])

    def keep(self, offset: int) -> None:
        """Make all bytes before `offset` survive a kill."""
        with _disk_errors(self._place(offset)):
            self.file.sync()
            self._output.put(_note(self._plan.name), json.dumps({"offset": offset}).encode())

    def _place(self, offset: int) -> str:
        return f"{self._output.where}/{self._plan.name}: {self._plan.tensor_at(offset)}"


class RemoteOutput:
    """A directory behind an fsspec URL.

    Raises:
        CheckpointError: see `remote.connect`.
    """

    def __init__(self, url: str) -> None:
        self._store = RemoteStore(url)
        self.where = self._store.root

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""
        return self._store.size(name)

    def read(self, name: str) -> bytes | None:
        """All of a small file, None if it does not exist."""
        size = self._store.size(name)
        return None if size is None else bytes(self._store.read_at(name, 0, size))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole."""
        self._store.put(name, data)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self._store.remove(name)

    def names(self) -> list[str]:
        """Files and directories directly inside."""
        found = self._store.list()
        if found is None:
            raise CheckpointError("TT307", self.where, "cannot be written to",
                                  hint="name a directory or an object store")
        return found

    def free(self) -> None:
        """Nobody knows how much an object store takes."""

    def kept(self, plan: FilePlan) -> int:
        """Nothing: an upload that was killed begins again."""
        return 0

    def write(self, plan: FilePlan, pipeline: Pipeline, moved: Moved) -> FileRecord:
        """Write one planned file; a failed upload is begun again."""
        part_bytes = max(_SMALLEST_PART, round_up(plan.size // _MOST_PARTS))
        for attempt in range(_UPLOADS):
            done = 0

            def count(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                moved(num_bytes)

            try:
                with self._store.upload(plan.name, part_bytes) as handle:
                    record = pipeline.write(plan, _UploadSink(handle), moved=count)
                break
            except CheckpointError as error:
                # A tensor that cannot be read does not get better by writing it again.
                if error.code != "TT314" or attempt == _UPLOADS - 1:
                    raise
                moved(-done)
        if self.size(plan.name) != plan.size:
            raise CheckpointError("TT314", f"{self.where}/{plan.name}",
                                  f"must have {plan.size} bytes", value=self.size(plan.name))
        self.put(record_name(plan.name), _record_text(record))
        return record

    def complete(self, plan: FilePlan) -> bool:
        """Whether a file that has a record is whole."""
        return self.size(plan.name) == plan.size

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Object stores have no locks; two writers of one part write the same bytes."""
        del name
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind that only helps to go on."""
        self._store.remove_tree(WORK)


class _UploadSink:
    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle

    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        """Append the first `num_bytes` of a block."""
        del offset  # blocks come in their order
        self._handle.write(block[:num_bytes])

    def keep(self, offset: int) -> None:
        """Parts of an upload are of no use to another process."""


def open_output(dst: str | Path) -> Output:
    """The output that a path or URL names.

    Raises:
        CheckpointError: TT309 if a file is in the way; see `remote.connect`.
    """
    text = str(dst)
    if "://" in text:
        return RemoteOutput(text.rstrip("/"))
    path = Path(dst).expanduser()
    for place in (path, *path.parents):
        if place.is_file():
            raise CheckpointError("TT309", str(place), "is a file", hint="choose another directory")
    return LocalOutput(path)


def record_name(name: str) -> str:
    """Where the size and hash of a finished file stand while others are being written."""
    return f"{WORK}/{name}.json"


def _record_text(record: FileRecord) -> bytes:
    return json.dumps({"bytes": record.bytes, "sha256": record.sha256}).encode()


def _note(name: str) -> str:
    return f"{WORK}/{name}.offset"


@contextmanager
def _disk_errors(place: str) -> Iterator[None]:
    """Name the place where the disk fails."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code, advice = ("TT311", "free space") if is_full else ("TT314", "check disk and permissions")
        hint = f"finished files are kept: {advice}, then run the same command again"
        raise CheckpointError(code, place, f"cannot be written: {os.strerror(error.errno or 0)}",
                              hint=hint) from error
