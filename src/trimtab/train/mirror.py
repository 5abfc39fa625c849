"""Copies of finished training states in object storage, each committed by its manifest.

Knows: fsspec, the order in which files are copied, how many copies stay. Does not know: what a
state holds, credentials: these are the environment's matter and stand in no URL.

A state without its manifest is no state: the manifest is copied last and removed first.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from trimtab.checkpoint.manifest import MANIFEST_NAME, read_manifest
from trimtab.config.watch import CheckpointSection
from trimtab.errors import RunError

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
        RunError: TT604, the package for such URLs is not installed.
    """

    def __init__(self, url: str, *, keep: int, say: Callable[[str], None]) -> None:
        import fsspec  # type: ignore[import-untyped]  # it ships no types

        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise RunError("TT604", "checkpoint.mirror", f"cannot be written: {error}", value=url,
                           hint="pip install 'trimtab[s3]' for s3 URLs") from error
        self._files = cast(_FileSystem, system)
        self._root, self._url, self._keep, self._say = str(root), url, keep, say

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
