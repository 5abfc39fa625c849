"""Copies of finished training states in object storage, each committed by its manifest.

Knows: fsspec, the order in which files are copied, how many copies stay. Does not know: what a
state holds, credentials: these are the environment's matter and stand in no URL.

A state without its manifest is no state: the manifest is copied last and removed first. Copies are
made in a thread of their own, so that neither training nor the next save waits for a slow store; of
states that have to wait only the newest is copied.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, Self, cast

from trimtab.checkpoint.manifest import MANIFEST_NAME, read_manifest
from trimtab.checkpoint.remote import connect
from trimtab.config.watch import CheckpointSection
from trimtab.errors import CheckpointError, RunError

_PREFIX = "step-"


class _FileSystem(Protocol):
    """What is used of an fsspec file system."""

    def put_file(self, lpath: str, rpath: str) -> None: ...

    def makedirs(self, path: str, exist_ok: bool) -> None: ...

    def ls(self, path: str, detail: bool) -> list[str]: ...

    def exists(self, path: str) -> bool: ...

    def rm(self, path: str, recursive: bool) -> None: ...

    def rm_file(self, path: str) -> None: ...


class Mirror:
    """Copies finished states below a URL.

    Args:
        url: directory, such as `s3://bucket/runs/one`.
        keep: how many copies stay.
        say: told of copies that failed; a run does not end for them.

    Raises:
        RunError: TT604, such URLs are not known, or their package is not installed.
    """

    def __init__(self, url: str, *, keep: int, say: Callable[[str], None]) -> None:
        try:
            system, root = connect(url)
        except CheckpointError as error:
            raise RunError("TT604", "checkpoint.mirror", f"cannot be written: {error.rule}",
                           value=url, hint=error.hint) from error
        self._files = cast(_FileSystem, system)
        self._root, self._url, self._keep, self._say = root, url, keep, say
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._copied: Path | None = None  # at this moment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # The newest state is worth waiting for; a store that does not answer ends by its own limits.
        self._pool.shutdown(wait=True)

    def copy_later(self, state: Path) -> None:
        """Copy a finished state in the background, once the copy before is done."""
        with self._lock:
            self._waiting = state
        self._pool.submit(self._copy_waiting)

    def in_use(self) -> frozenset[Path]:
        """States that must stay on disk until they are copied."""
        with self._lock:
            return frozenset(p for p in (self._waiting, self._copied) if p is not None)

    def _copy_waiting(self) -> None:
        with self._lock:
            state, self._waiting = self._waiting, None
            self._copied = state
        if state is not None:  # else a newer one took its place and is copied already
            self.copy(state)
        with self._lock:
            self._copied = None

    def copy(self, state: Path) -> None:
        """Copy one finished state and remove all but the newest."""
        target = posixpath.join(self._root, state.name)
        try:
            self._files.makedirs(target, exist_ok=True)
            for name in self._names(state):
                self._files.put_file(str(state / name), posixpath.join(target, name))
            self._prune()
        except Exception as error:  # noqa: BLE001  # stores raise what they like, and none may end a run
            # The class alone: messages of stores may hold signed URLs.
            self._say(f"warning: {state.name} was not copied to {self._url} ({type(error).__name__})")

    def states(self) -> list[str]:
        """Names of whole copies, newest first."""
        if not self._files.exists(self._root):
            return []
        names = [posixpath.basename(str(path).rstrip("/"))
                 for path in self._files.ls(self._root, detail=False)]
        whole = [name for name in names if name.startswith(_PREFIX) and self._files.exists(
            posixpath.join(self._root, name, MANIFEST_NAME))]
        return sorted(whole, key=lambda name: int(name.removeprefix(_PREFIX)), reverse=True)

    def _names(self, state: Path) -> list[str]:
        manifest = read_manifest(state)
        assert manifest is not None, "only finished states are copied"
        return [*manifest.files, MANIFEST_NAME]

    def _prune(self) -> None:
        for name in self.states()[max(1, self._keep):]:
            path = posixpath.join(self._root, name)
            self._files.rm_file(posixpath.join(path, MANIFEST_NAME))
            self._files.rm(path, recursive=True)


def open_mirror(settings: CheckpointSection, say: Callable[[str], None]) -> Mirror | None:
    """The mirror of a recipe, None where it names none.

    Raises:
        RunError: TT604, the package for its URL is not installed.
    """
    if settings.mirror is None:
        return None
    return Mirror(settings.mirror, keep=settings.keep, say=say)
