"""The marker of a directory that a writer of ours has begun and not finished.

Knows: the marker's name and how to refuse a directory that has it. Does not know: torch, what
is written (see `manifest`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trimtab.errors import CheckpointError

MARKER_NAME = ".trimtab-incomplete"


def is_begun_or_empty(names: Iterable[str]) -> bool:
    """Whether these names of a directory are those of nothing, or of what a writer of ours left.

    A writer that is killed while it writes the marker leaves no more than the marker's temporary
    file.
    """
    found = set(names)
    return MARKER_NAME in found or found <= {f"{MARKER_NAME}.tmp"}


def refuse_incomplete(directory: Path) -> None:
    """Raise TT305 if the writing of this directory was never finished."""
    if (directory / MARKER_NAME).exists():
        raise incomplete(str(directory))


def incomplete(where: str) -> CheckpointError:
    """The error of every reader on a directory with a marker."""
    return CheckpointError(
        "TT305", where, "was not written to its end and cannot be read",
        hint="run the command that writes it again; it goes on or starts over by itself",
    )
