"""Local files past the page cache: reads and writes in aligned blocks, buffered where they must be.

Knows: O_DIRECT, its alignment and how to do without. Does not know: what the bytes mean.

A conversion reads and writes each byte once, so that the page cache would only push out what other
programs keep there. Reads go through one aligned buffer per thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

ALIGNMENT = 4096
READ_BUFFER_BYTES = 4 * 2**20
_SMALLEST_DIRECT = 256 * 1024
# The flag exists on Linux only; elsewhere every file is buffered.
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed memory that begins on a page, at least one page long, outside the heap."""
    return memoryview(mmap.mmap(-1, max(num_bytes, ALIGNMENT)))


def round_up(num_bytes: int) -> int:
    """The next multiple of the alignment.

    >>> round_up(4097)
    8192
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class DirectReader:
    """Reads ranges of files of one file system; safe to share between threads."""

    def __init__(self) -> None:
        self._is_direct = bool(_DIRECT)
        self._local = threading.local()

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset`; returns the bytes read, fewer only at the end of the file.

        Raises:
            OSError: the file cannot be opened or read.
        """
        if self._is_direct and len(out) >= _SMALLEST_DIRECT:
            try:
                return self._read_direct(path, offset, out)
            except OSError as error:
                # EINVAL: a file system without O_DIRECT, or one with stricter alignment.
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
        handle = os.open(path, os.O_RDONLY)
        try:
            return _read_all(handle, offset, out)
        finally:
            os.close(handle)

    def _read_direct(self, path: Path, offset: int, out: memoryview) -> int:
        buffer = self._buffer()
        handle = os.open(path, os.O_RDONLY | _DIRECT)
        try:
            done = 0
            while done < len(out):
                position = offset + done
                begin = position // ALIGNMENT * ALIGNMENT
                skipped = position - begin
                wanted = min(len(buffer), round_up(skipped + len(out) - done))
                count = _read_all(handle, begin, buffer[:wanted])
                useful = min(count - skipped, len(out) - done)
                if useful <= 0:
                    break
                out[done : done + useful] = buffer[skipped : skipped + useful]
                done += useful
                if count < wanted:
                    break
            return done
        finally:
            os.close(handle)

    def _buffer(self) -> memoryview:
        found: memoryview | None = getattr(self._local, "buffer", None)
        if found is None:
            found = self._local.buffer = aligned_buffer(READ_BUFFER_BYTES)
        return found


def _read_all(handle: int, offset: int, out: memoryview) -> int:
    done = 0
    while done < len(out):
        count = os.preadv(handle, [out[done:]], offset + done)
        if not count:
            break
        done += count
        if done % ALIGNMENT:  # the end of the file; a direct read cannot go on from here
            break
    return done


class BlockFile:
    """A file written in aligned blocks, each at its offset, and cut to its size at the end.

    Args:
        path: created if absent; what it holds is kept until written over.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT
        self._is_direct = bool(_DIRECT)
        try:
            self._handle = os.open(path, flags | _DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False
            self._handle = os.open(path, flags, 0o644)

    def write(self, offset: int, block: memoryview) -> None:
        """Write a block.

        Args:
            offset: a multiple of the alignment.
            block: aligned memory, its length a multiple of the alignment.

        Raises:
            OSError: the disk is full or fails.
        """
        done = 0
        while done < len(block):
            try:
                done += os.pwrite(self._handle, block[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._reopen_buffered()

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self._handle)

    def finish(self, size: int) -> None:
        """Cut the file to its size, sync and close it."""
        os.ftruncate(self._handle, size)
        os.fsync(self._handle)
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _reopen_buffered(self) -> None:
        self._is_direct = False
        os.close(self._handle)
        self._handle = os.open(self._path, os.O_RDWR)
