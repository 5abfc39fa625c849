"""Copying files without copying bytes where the file system can share them.

Knows: reflinks (FICLONE) and copies inside the kernel, and how to do without either. Does not
know: what a file holds.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

# Linux: make a file share all blocks of another one.
_FICLONE = 0x40049409
_COPY_BYTES = 64 * 2**20
_READ_BYTES = 8 * 2**20


def clone_file(src: Path, dst: Path) -> bool:
    """Give a new file the content of another; True where both share their blocks.

    Raises:
        OSError: a file cannot be read or written.
    """
    with src.open("rb") as source, dst.open("wb") as target:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        except OSError:  # another disk, or a file system without shared blocks
            _copy(source.fileno(), target.fileno(), os.fstat(source.fileno()).st_size)
            return False
    return True


def shares_blocks(src: Path, directory: Path) -> bool:
    """Whether a clone of `src` in `directory` takes no space.

    Raises:
        OSError: `directory` cannot be written.
    """
    trial = directory / f".{src.name}.clone"
    try:
        with src.open("rb") as source, trial.open("wb") as target:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    finally:
        trial.unlink(missing_ok=True)
    return True


def _copy(source: int, target: int, size: int) -> None:
    done = 0
    try:
        while done < size:
            count = os.copy_file_range(source, target, min(_COPY_BYTES, size - done), done, done)
            if not count:
                break
            done += count
    except OSError:  # the kernel or one of the file systems has no such call
        pass
    while done < size:
        block = os.pread(source, _READ_BYTES, done)
        if not block:
            raise OSError(f"the file ended at {done} of {size} bytes while it was copied")
        done += os.pwrite(target, block, done)
