"""Saving training states while training goes on.

Knows: snapshots, one writing thread, failed writes. Does not know: what a state means.

`save` copies the tensors (the adapter and its two moments, no more) and returns; a thread writes
them. One state is written at a time; a failure ends the run at the next call, with the states
before it untouched.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.nn import Parameter

from trimtab.errors import RunError
from trimtab.train.mirror import Mirror
from trimtab.train.state import TrainState, snapshot, write_state

MAKE_ROOM = "the states before it are whole; make room and run the same command again"


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class Saver:
    """Writes the states of a run in the background.

    Args:
        checkpoints: directory of the states.
        keep: how many stay.
        mirror: gets each finished directory.
    """

    def __init__(self, checkpoints: Path, *, keep: int, mirror: Mirror | None = None) -> None:
        self._checkpoints, self._keep, self._mirror = checkpoints, keep, mirror
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[None] | None = None

    def save(
        self, state: TrainState, parameters: Mapping[str, Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Begin to write a state, once the one before is on disk.

        Raises:
            RunError: as for `wait`, from the state before.
        """
        self.wait()
        taken = snapshot(parameters, optimizer)
        self._pending = self._pool.submit(self._write, state, *taken)

    def wait(self) -> None:
        """Return when what was given is on disk.

        Raises:
            RunError: TT311 the disk is full, TT603 it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            raise RunError(
                "TT311" if is_full(error) else "TT603", str(self._checkpoints),
                f"the training state was not written: {error.strerror or error}", hint=MAKE_ROOM,
            ) from error

    def _write(
        self, state: TrainState, tensors: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]
    ) -> None:
        in_use = frozenset() if self._mirror is None else self._mirror.in_use()
        path = write_state(self._checkpoints, state, tensors, moments, keep=self._keep, in_use=in_use)
        if self._mirror is not None:
            self._mirror.copy_later(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What is being written is finished also after an error; its own failure is not the news.
        self._pool.shutdown(wait=True)
        if error is None:
            self.wait()
