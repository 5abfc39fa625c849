"""One process at a time in a run directory, and a signal that asks it to stop.

Knows: file locks, SIGTERM. Does not know: what runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from trimtab.errors import RunError


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold a directory for this process; the system lets go of it however the process ends.

    The lock is on the directory itself, so that it leaves no file behind.

    Yields:
        False where the file system knows no such locks.

    Raises:
        RunError: TT601, another process holds it, or it is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise RunError("TT601", "output", "is a file, not a directory", value=directory)
    created = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        taken = _take(handle, directory)
        try:
            yield taken
        finally:
            if created:
                with suppress(OSError):
                    directory.rmdir()  # only where nothing was written
    finally:
        os.close(handle)


def _take(handle: int, directory: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunError("TT601", "output", "is in use by another process", value=directory,
                           hint="wait for it, stop it, or choose another `output`") from None
        return False
    return True


class StopRequest:
    """Whether the process was asked to end; true from the first SIGTERM on."""

    def __init__(self) -> None:
        self.received = False

    def __bool__(self) -> bool:
        return self.received


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Turn SIGTERM into a request inside the block; a second one ends the process at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only there are signals set
        yield request
        return

    def asked(_number: int, _frame: FrameType | None) -> None:
        request.received = True
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
