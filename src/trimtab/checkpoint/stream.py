"""Streaming: a safetensors file written front to back in blocks that several threads fill.

Knows: the pipeline from planned tensors through a few fixed buffers to a sink, the hash on the way,
the header. Does not know: where bytes come from (`moves`), what a sink is (`output`).

Memory is the buffers, whatever the size of the file. Blocks are filled in any order and written in
theirs, so that the hash of the file is known when its last byte is.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

from trimtab.checkpoint.direct import ALIGNMENT, READ_BUFFER_BYTES, aligned_buffer
from trimtab.checkpoint.headers import header_bytes
from trimtab.checkpoint.manifest import FileRecord
from trimtab.checkpoint.moves import PlannedTensor

LARGEST_BLOCK = 8 * 2**20
_SMALLEST_BLOCK = 64 * 2**10
# Blocks that are being hashed and written, so that neither waits for the other.
_LEAVING = 4
# What a thread needs beside its read buffer: rows of a cast in float32 and what they come from.
THREAD_BYTES = READ_BUFFER_BYTES + 8 * 2**20

Spread = Callable[[Sequence[Callable[[], None]]], None]
"""Makes calls, in turn or at the same time; all are done when it returns."""
Moved = Callable[[int], None]
"""Called with the bytes of each block written."""


class Sink(Protocol):
    """A file that is written front to back."""

    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        """Write the first `num_bytes` of an aligned block."""

    def keep(self, offset: int) -> None:
        """Make all bytes before `offset` survive a kill, if the sink can."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its tensors in file order, and the header that follows from them.

    Args:
        name: file name.
        tensors: in file order.
        header: length and JSON, filled up so that data begins at a multiple of the alignment.
        begins: absolute offset of each tensor.
        size: of the whole file in bytes.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]
    header: bytes
    begins: tuple[int, ...]
    size: int

    def tensor_at(self, offset: int) -> str:
        """Name of the tensor that an offset lies in, for messages."""
        number = bisect_right(self.begins, offset) - 1
        return "header" if number < 0 else self.tensors[number].name

    def fill(self, offset: int, out: memoryview, spread: Spread) -> None:
        """Fill `out` with the bytes of the file from `offset` on."""
        spread(list(self._calls(offset, out)))

    def _calls(self, offset: int, out: memoryview) -> Iterator[Callable[[], None]]:
        """What fills `out`, in calls that do not depend on each other."""
        done = min(max(0, len(self.header) - offset), len(out))
        out[:done] = self.header[offset : offset + done]
        number = bisect_right(self.begins, offset + done) - 1
        while done < len(out):
            tensor = self.tensors[number]
            start = offset + done - self.begins[number]
            count = min(tensor.num_bytes - start, len(out) - done)
            count = min(count, tensor.grain - start % tensor.grain)
            if start == tensor.num_bytes:
                number += 1
                continue
            yield partial(tensor.fill, start, out[done : done + count])
            done += count


def plan_file(name: str, tensors: Sequence[PlannedTensor]) -> FilePlan:
    """Lay tensors out in a file."""
    begins = list(accumulate((tensor.num_bytes for tensor in tensors), initial=0))
    whole = header_bytes(tensors, ALIGNMENT)
    return FilePlan(
        name, tuple(tensors), whole, tuple(len(whole) + begin for begin in begins[:-1]),
        len(whole) + begins[-1],
    )


def split_by_bytes(tensors: Sequence[PlannedTensor], most: int) -> list[list[PlannedTensor]]:
    """Groups in order, of at most `most` bytes each; a larger tensor is alone in its group."""
    groups: list[list[PlannedTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and held + tensor.num_bytes > most:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.num_bytes
    return groups


def least_bytes(workers: int) -> int:
    """The least memory that threads and buffers need."""
    return workers * THREAD_BYTES + (workers + _LEAVING) * _SMALLEST_BLOCK


class Pipeline:
    """Threads and buffers that write one file after another; use as a context manager.

    Args:
        num_bytes: memory for threads and buffers, at least `least_bytes`.
        workers: threads that fill blocks.
        keep_every: bytes after which a sink is told to keep what it has.
        spread: how the calls that fill a block are made; in turn by default.
    """

    def __init__(
        self, num_bytes: int, workers: int, keep_every: int = 2**28, spread: Spread | None = None
    ) -> None:
        self._spread = spread or _in_turn
        count = workers + _LEAVING
        each = (num_bytes - workers * THREAD_BYTES) // count
        self.block_bytes = min(each, LARGEST_BLOCK) // ALIGNMENT * ALIGNMENT
        self._blocks = [aligned_buffer(self.block_bytes) for _ in range(count)]
        self._workers = workers
        self._start()
        self._keep_every = max(keep_every, self.block_bytes)

    def _start(self) -> None:
        self._free = deque(self._blocks)
        self._fillers = ThreadPoolExecutor(self._workers, "fill")
        # One thread each, so that blocks are hashed and written in their order.
        self._hasher = ThreadPoolExecutor(1, "hash")
        self._writer = ThreadPoolExecutor(1, "write")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._fillers.shutdown(wait=True, cancel_futures=True)
        self._hasher.shutdown(wait=True)
        self._writer.shutdown(wait=True)

    def write(
        self, plan: FilePlan, sink: Sink, *, start: int = 0, moved: Moved,
        read_back: Callable[[int, memoryview], None] | None = None,
    ) -> FileRecord:
        """Write a file from `start` on.

        Args:
            plan: the file.
            sink: where it goes.
            start: a multiple of the alignment; what lies before is on the disk already.
            moved: called with the bytes of each block.
            read_back: fills a block from an offset of what is on the disk, for its hash.

        Returns:
            Size and hash of the whole file.

        Raises:
            CheckpointError: a tensor cannot be read or holds bad numbers.
            OSError: the sink fails.
        """
        try:
            return self._write(plan, sink, start, moved, read_back)
        except BaseException:
            self._settle()
            raise

    def _write(
        self, plan: FilePlan, sink: Sink, start: int, moved: Moved,
        read_back: Callable[[int, memoryview], None] | None,
    ) -> FileRecord:
        digest, kept, sink = hashlib.sha256(), start, _Stopping(sink)
        offsets = iter(range(0, plan.size, self.block_bytes))
        filling: deque[tuple[int, memoryview, int, Future[None]]] = deque()
        leaving: deque[tuple[memoryview, Future[None], Future[None]]] = deque()
        keeping = _nothing()
        while True:
            while self._free and (offset := next(offsets, None)) is not None:
                filling.append(self._begin(plan, offset, start, read_back))
            if not filling:
                break
            offset, block, count, filled = filling.popleft()
            filled.result()
            end = offset + count
            hashed = self._hasher.submit(digest.update, block[:count])
            leaving.append(
                (block, hashed, self._submit(sink, offset, block, count if end > start else 0))
            )
            if len(leaving) == _LEAVING:
                self._finish(leaving.popleft())
            moved(count)
            if end - kept >= self._keep_every and end < plan.size:
                keeping.result()
                # The writer does one thing after another, so that all before `end` is written then.
                keeping, kept = self._writer.submit(sink.keep, end), end
        for block_leaving in leaving:
            self._finish(block_leaving)
        keeping.result()
        return FileRecord(plan.size, digest.hexdigest())

    def _begin(
        self, plan: FilePlan, offset: int, start: int,
        read_back: Callable[[int, memoryview], None] | None,
    ) -> tuple[int, memoryview, int, Future[None]]:
        block = self._free.popleft()
        count = min(self.block_bytes, plan.size - offset)
        if offset + count <= start and read_back is not None:
            filled = self._fillers.submit(read_back, offset, block[:count])
        else:
            filled = self._fillers.submit(plan.fill, offset, block[:count], self._spread)
        return offset, block, count, filled

    def _submit(
        self, sink: Sink, offset: int, block: memoryview, num_bytes: int
    ) -> Future[None]:
        """Write a block in the background; one that is on the disk already is not written again."""
        if num_bytes:
            return self._writer.submit(sink.write, offset, block, num_bytes)
        return _nothing()

    def _finish(self, leaving: tuple[memoryview, Future[None], Future[None]]) -> None:
        block, hashed, written = leaving
        written.result()
        hashed.result()
        self._free.append(block)

    def _settle(self) -> None:
        """After a failure: wait until no thread uses a buffer, then take all of them back."""
        for executor in (self._fillers, self._hasher, self._writer):
            executor.shutdown(wait=True, cancel_futures=True)
        self._start()


class _Stopping:
    """A sink that does nothing more once it has failed: nothing behind a hole may count as kept."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._has_failed = False

    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        """Write the first `num_bytes` of an aligned block."""
        self._unless_failed(partial(self._sink.write, offset, block, num_bytes))

    def keep(self, offset: int) -> None:
        """Make all bytes before `offset` survive a kill, if the sink can."""
        self._unless_failed(partial(self._sink.keep, offset))

    def _unless_failed(self, call: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except BaseException:
            self._has_failed = True
            raise


def _in_turn(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
