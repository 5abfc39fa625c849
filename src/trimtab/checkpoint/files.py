"""File stores: sizes and byte ranges of files in one local or remote directory.

Knows: the file system and fsspec. Does not know: torch, safetensors, models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trimtab.errors import CheckpointError


class FileStore(Protocol):
    """What a source needs of a directory."""

    root: str

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""

    def list(self) -> list[str] | None:
        """Names of the files directly inside, None if the store cannot say."""

    def read_at(self, name: str, offset: int, length: int) -> bytearray:
        """Bytes from `offset`, fewer than `length` only at the end of the file."""


class LocalStore:
    """A directory of this machine."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self.root = str(root)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist."""
        path = self._path / name
        return path.stat().st_size if path.is_file() else None

    def list(self) -> list[str]:
        """Names of the files directly inside."""
        return [path.name for path in self._path.iterdir() if path.is_file()]

    def read_at(self, name: str, offset: int, length: int) -> bytearray:
        """Bytes from `offset`, fewer than `length` only at the end of the file."""
        buffer = bytearray(length)
        view, done = memoryview(buffer), 0
        with (self._path / name).open("rb", buffering=0) as handle:
            handle.seek(offset)
            while done < length:
                count = handle.readinto(view[done:])
                if not count:
                    break
                done += count
        view.release()
        del buffer[done:]
        return buffer


class RemoteStore:
    """A directory behind an fsspec URL.

    Raises:
        CheckpointError: TT604 if the protocol needs a package that is not installed, TT307 if
            the URL has a protocol that fsspec does not know.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped] # it ships no types

        self.root = url
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            hint = "pip install 'trimtab[http]' (or [s3], [hub], or the package fsspec names)"
            raise CheckpointError("TT604", url, str(error), hint=hint) from error
        except ValueError as error:
            raise CheckpointError("TT307", url, str(error)) from error

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it does not exist.

        Raises:
            CheckpointError: TT307 if the store does not answer or does not tell the size.
        """
        path = f"{self._path}/{name}"
        try:
            size = self._fs.size(path)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise CheckpointError("TT307", f"{self.root}/{name}", f"no answer: {error}") from error
        if size is None:
            raise CheckpointError("TT307", f"{self.root}/{name}", "the server tells no size")
        return int(size)

    def list(self) -> list[str] | None:
        """Names of the files directly inside, None over HTTP, which cannot say."""
        if "http" in self._fs.protocol:
            return None
        try:
            found = self._fs.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [row["name"].rsplit("/", 1)[-1] for row in found if row["type"] == "file"]

    def read_at(self, name: str, offset: int, length: int) -> bytearray:
        """Bytes from `offset`, fewer than `length` only at the end of the file.

        Raises:
            CheckpointError: TT301 if the store fails or ignores the range.
        """
        if not length:
            return bytearray()
        where = f"{self.root}/{name}"
        try:
            raw = self._fs.cat_file(f"{self._path}/{name}", start=offset, end=offset + length)
        except Exception as error:
            raise CheckpointError("TT301", where, f"range cannot be read: {error}") from error
        if len(raw) > length:
            rule = f"asked for {length} bytes, got {len(raw)}; the server must support ranges"
            raise CheckpointError("TT301", where, rule)
        return bytearray(raw)
