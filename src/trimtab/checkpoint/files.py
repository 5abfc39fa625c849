"""File stores: sizes and byte ranges of files in one local or remote directory.

Knows: what a source needs of a directory, and local directories. Does not know: torch,
safetensors, models; URLs (see `remote`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trimtab.checkpoint.direct import DirectReader
from trimtab.errors import CheckpointError


class FileStore(Protocol):
    """What a source needs of a directory."""

    root: str

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""

    def list(self) -> list[str] | None:
        """Names of the files directly inside, None if the store cannot say."""

    def state(self, name: str) -> str:
        """A text that changes when the file does."""

    def read_at(self, name: str, offset: int, length: int) -> bytearray:
        """Bytes from `offset`, fewer than `length` only at the end of the file."""

    def read_into(self, name: str, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset`; returns the bytes read, fewer only at the end of the file."""

    def spread(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls that read, at the same time where that is faster."""


class LocalStore:
    """A directory of this machine."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self.root = str(root)
        self._reader = DirectReader()

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""
        path = self._path / name
        return path.stat().st_size if path.is_file() else None

    def list(self) -> list[str]:
        """Names of the files directly inside."""
        return [path.name for path in self._path.iterdir() if path.is_file()]

    def state(self, name: str) -> str:
        """Size and time of the last change of a file."""
        found = (self._path / name).stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def read_at(self, name: str, offset: int, length: int) -> bytearray:
        """Bytes from `offset`, fewer than `length` only at the end of the file."""
        buffer = bytearray(length)
        view = memoryview(buffer)
        count = self.read_into(name, offset, view)
        view.release()
        del buffer[count:]
        return buffer

    def read_into(self, name: str, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset`; returns the bytes read, fewer only at the end of the file.

        Raises:
            CheckpointError: TT301 if the file cannot be read.
        """
        try:
            return self._reader.read_into(self._path / name, offset, out)
        except OSError as error:
            hint = "check the permissions and the disk"
            where = f"{self.root}/{name}"
            raise CheckpointError("TT301", where, f"cannot be read: {error}", hint=hint) from error

    def spread(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls that read, one after the other: the caller has threads enough for a disk."""
        for call in calls:
            call()
